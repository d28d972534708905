//! What `margay flow watch` tells of a connection, when, and with which counts.

mod host;

use host::{BY_HAND, Host};

/// A service of this host, and somebody who watches. `talk` sends 1000 bytes and reads 5000; the server closes when it
/// has the client's end.
const WORDS: &str = r#"
trap 'margay down >/dev/null 2>&1 || true; kill $(jobs -p) 2>/dev/null || true' EXIT
await() { for _ in {1..200}; do if "$@"; then return 0; fi; sleep 0.05; done; echo "never: \
    $*"; cat "$dir/watched"; exit 1; }
told() { grep -c "\"kind\":\"$1\"" "$dir/watched" >/dev/null; }
margay up --router >/dev/null
margay id authority create shop >/dev/null
coproc server { exec python3 -c '
import socket
door = socket.create_server(("", 8000))
print("ready", flush=True)
while True:
    end, _ = door.accept()
    while end.recv(65536): pass
    end.sendall(b"x" * 5000)
    end.close()'; }
read -r ready <&"${server[0]}"; [ "$ready" = ready ]
margay service publish web.shop --listen 0.0.0.0:8000 >/dev/null
watch() { margay flow watch "${@:2}" >"$dir/$1" 2>"$dir/$1-says" & }
watching() { grep '^margay: watching' "$dir/$1-says" >/dev/null 2>&1; }
watch watched --json
await watching watched
connect() { python3 -c '
import socket, sys
end = socket.create_connection(("web.shop.sal.internal", int(sys.argv[1])))
end.sendall(b"y" * 1000)
print("sent", flush=True)
sys.stdin.readline()
end.shutdown(socket.SHUT_WR)
while end.recv(65536): pass' "$1"; }
"#;

fn with_a_watcher(script: &str) {
    Host::new(Some(BY_HAND)).boot("", &format!("{WORDS}\n{script}"));
}

#[test]
fn a_flow_that_is_over_is_told_while_it_lingers_with_what_it_has_carried() {
    with_a_watcher(
        r#"
        connect 8000 </dev/null >/dev/null
        # Of a connection to this very host there are two flows.
        both() { [ "$(grep -c '"kind":"closed"' "$dir/watched")" = 2 ]; }; await both
        # Its record lingers for ten seconds, and its end is told before that is over.
        margay flow list --json | grep '"lifecycle": "closed"' >/dev/null
        closed=$(grep '"kind":"closed"' "$dir/watched")
        grep '"why":"closed"' <<<"$closed" >/dev/null
        # What a TCP sends again counts again: after 2 ms without an acknowledgement it may (RFC 8985 §7).
        asked='[1-4][0-9]{3}' answered='[5-9][0-9]{3}'
        for counts in "$asked,\"received_bytes\":$answered" "$answered,\"received_bytes\":$asked"; do
            grep -E "\"sent_bytes\":$counts," <<<"$closed" >/dev/null || { echo "$closed"; exit 1; }
        done
        gone() { ! margay flow list --json | grep '"lifecycle"' >/dev/null; }
        for _ in {1..60}; do if gone; then break; fi; sleep 0.5; done
        gone || { margay flow list --json; exit 1; }
        # Each flow once.
        [ "$(grep -c '"kind":"closed"' "$dir/watched")" = "$(grep -c '"kind":"opened"' "$dir/watched")" ] ||
            { cat "$dir/watched"; exit 1; }
        "#,
    );
}

#[test]
fn a_flow_that_an_operator_closes_is_told_with_what_it_has_carried() {
    with_a_watcher(
        r#"
        coproc client { connect 8000; }
        read -r sent <&"${client[0]}"; [ "$sent" = sent ]
        await told opened
        # By both ends: the one may have sent what the other has yet to take.
        carried() { [ "$(margay flow list --json | grep -cE '"(sent|received)_bytes": [1-4]000')" = 2 ]; }
        await carried
        for flow in $(margay flow list --json | sed -n 's/.*"flow": "\(.*\)",/\1/p'); do
            margay flow close "$flow" >/dev/null 2>&1 || true
        done
        await told closed
        grep '"why":"operator"' "$dir/watched" >/dev/null
        ! grep '"kind":"closed".*"sent_bytes":0,"received_bytes":0' "$dir/watched"
        "#,
    );
}

#[test]
fn a_failed_connect_is_one_word_in_text_and_in_json() {
    with_a_watcher(
        r#"
        watch text
        await watching text
        margay route add bad.shop drop >/dev/null
        if (exec 3<>/dev/tcp/bad.shop.sal.internal/80) 2>/dev/null; then echo 'a rule discards it'; exit 1; fi
        await told connect-failed
        in_text() { grep '^connect-failed  bad.shop .*: ' "$dir/text" >/dev/null; }; await in_text
        "#,
    );
}
