"""Serves a name with frames, alone or as a member of an ensemble: answers each with what it is called and the frame.

    python3 frames_server.py work-members.shop first
"""

import sys
import threading

import margay


def serve(client: margay.Frames, label: str) -> None:
    with client:
        for arrival in client:
            if isinstance(arrival, margay.Frame) and arrival.wants_answer:
                client.answer(arrival, f"{label}: ".encode() + arrival.data)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "work.shop"
    label = sys.argv[2] if len(sys.argv) > 2 else ""
    with margay.listen_frames(name, label=label) as listener:
        print(f"serving {name}", flush=True)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=serve, args=(client, label), daemon=True).start()


main()
