//! Web servers and their clients.

use super::App;

const NGINX: &str = r#"exec bash -eu "$SCRIPTS/nginx.sh""#;

/// The applications.
pub const APPS: &[App] = &[
    App {
        name: "nginx",
        packages: &["nginx", "curl"],
        ports: &[8001],
        protocols: &["tcp"],
        serve: NGINX,
        // Twenty requests on one connection.
        client: r#"
            url=http://$NAME:$PORT
            curl -sS --fail -w '%{stderr}%{num_connects}\n' \
                $(printf "$url/payload?%s -o got%s " $(seq 19 | sed 's/.*/& &/')) "$url/word" 2> connects
            for number in $(seq 19); do cmp "got$number" "$PAYLOAD"; done
            echo "connections: $(paste -sd+ connects | tr + '\n' | awk '{ sum += $1 } END { print sum }')"
        "#,
        prints: &["WORD", "connections: 1\n"],
    },
    App {
        name: "mini-httpd",
        packages: &["mini-httpd", "curl"],
        ports: &[8002],
        protocols: &["tcp"],
        serve: r#"
            cp "$PAYLOAD" payload
            echo "$WORD" > word
            exec mini_httpd -D -h 0.0.0.0 -p "$PORT" -d "$PWD" -u root
        "#,
        client: r#"
            curl -sS --fail "http://$NAME:$PORT/payload" | cmp - "$PAYLOAD"
            curl -sS --fail "http://$NAME:$PORT/word"
        "#,
        prints: &["WORD"],
    },
    App {
        name: "wget",
        packages: &["wget", "nginx"],
        ports: &[8003],
        protocols: &["tcp"],
        serve: NGINX,
        client: r#"
            wget -nv -O got "http://$NAME:$PORT/payload"
            cmp got "$PAYLOAD"
            wget -nv -O - "http://$NAME:$PORT/word"
        "#,
        prints: &["WORD"],
    },
    App {
        name: "elinks",
        packages: &["elinks", "nginx"],
        ports: &[8004],
        protocols: &["tcp"],
        serve: NGINX,
        client: r#"elinks -no-home -dump "http://$NAME:$PORT/index.html""#,
        prints: &["WORD"],
    },
    App {
        name: "chromium",
        packages: &["chromium", "nginx"],
        ports: &[8005],
        protocols: &["tcp"],
        serve: NGINX,
        client: r#"
            chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$PWD/profile" \
                --timeout=60000 --virtual-time-budget=20000 --dump-dom "http://$NAME:$PORT/fetches.html"
        "#,
        prints: &["WORD: 12 of 3000000"],
    },
    App {
        name: "ab",
        packages: &["apache2-utils", "nginx"],
        ports: &[8006],
        protocols: &["tcp"],
        serve: NGINX,
        client: r#"
            ab -q -n 1000 -c 20 "http://$NAME:$PORT/word"
            ab -q -k -n 200 -c 10 "http://$NAME:$PORT/payload" > kept
            grep -E '^(Complete|Failed) requests|^HTML transferred' kept | tr -s ' ' | paste -sd ' '
        "#,
        prints: &[
            "Complete requests:      1000\nFailed requests:        0\n",
            "Complete requests: 200 Failed requests: 0 HTML transferred: 600000000 bytes",
        ],
    },
    App {
        name: "http2",
        packages: &["nghttp2-client", "curl", "nginx", "openssl"],
        ports: &[8007],
        protocols: &["tcp"],
        serve: r#"
            openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "/CN=$NAME" \
                -addext "subjectAltName=DNS:$NAME" -keyout key.pem -out certificate.pem
            exec bash -eu "$SCRIPTS/nginx.sh" \
                "ssl http2; ssl_certificate $PWD/certificate.pem; ssl_certificate_key $PWD/key.pem"
        "#,
        client: r#"
            # The certificate is for the service's name.
            curl -sS --fail --http2 --cacert "$SERVED/certificate.pem" -w '%{stderr}version %{http_version}\n' -o got \
                "https://$NAME:$PORT/payload" 2>&1
            cmp got "$PAYLOAD"
            h2load -n 400 -c 4 -m 10 "https://$NAME:$PORT/word"
        "#,
        prints: &["version 2", "400 succeeded, 0 failed, 0 errored, 0 timeout", "status codes: 400 2xx"],
    },
    App {
        name: "websocket",
        packages: &["python3-websockets"],
        ports: &[8008],
        protocols: &["tcp"],
        serve: r#"exec /usr/bin/python3 "$SCRIPTS/websocket_server.py""#,
        client: r#"/usr/bin/python3 "$SCRIPTS/websocket_client.py""#,
        prints: &["WORD: 200 messages and 3000000 bytes came back"],
    },
    App {
        name: "grpc",
        packages: &["python3-grpcio"],
        ports: &[8009],
        protocols: &["tcp"],
        serve: r#"exec /usr/bin/python3 "$SCRIPTS/grpc_server.py""#,
        client: r#"/usr/bin/python3 "$SCRIPTS/grpc_client.py""#,
        prints: &["WORD: 1000 messages streamed"],
    },
];
