"""Sends frames to a server of frames, or to an ensemble, and prints the answers. A word with a colon has a key before
it.

    python3 frames_client.py work.shop user1:hello user2:hello
"""

import sys

import margay


def main() -> None:
    name, *words = sys.argv[1:] or ["work.shop"]
    with margay.connect_frames(name) as server:
        for word in words:
            key = word.partition(":")[0] if ":" in word else ""
            # Nothing that would harm if two servers did it.
            server.send(word.encode(), key=key.encode(), wants_answer=True, safe=True)
        for _ in words:
            arrival = server.recv()
            if isinstance(arrival, margay.Frame):
                print(arrival.data.decode())
            elif isinstance(arrival, margay.Lost):
                print(f"nobody says what has become of frame {arrival.number}")


main()
