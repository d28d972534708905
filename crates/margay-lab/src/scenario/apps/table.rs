//! Applications that are not of the web.

use super::App;

/// The applications.
pub const APPS: &[App] = &[
    App {
        name: "iperf",
        packages: &["iperf"],
        ports: &[5001],
        protocols: &["tcp", "udp"],
        serve: r#"
            iperf -s -u -p "$PORT" &
            exec iperf -s -p "$PORT"
        "#,
        // The client counts what came from the server, then the server what came from the client.
        client: r#"
            iperf -c "$NAME" -p "$PORT" -R -n 50M -f m
            iperf -c "$NAME" -p "$PORT" -u -b 10M -n 1M -f m
        "#,
        prints: &["50.0 MBytes", "Server Report:", "1.00 MBytes"],
    },
    App {
        name: "iperf3",
        packages: &["iperf3", "python3"],
        ports: &[5201, 5202, 5203],
        protocols: &["tcp"],
        // A server for each run: after one it closes its listener, and makes another.
        serve: r#"
            for port in $((PORT + 1)) $((PORT + 2)); do
                iperf3 -s -p $port &
                until ss -Hltn "sport = :$port" | grep -q .; do sleep 0.02; done
            done
            exec iperf3 -s -p "$PORT"
        "#,
        client: r#"
            iperf3 -c "$NAME" -p "$PORT" -n 50M -J > sent
            iperf3 -c "$NAME" -p $((PORT + 1)) -R -n 50M -J > received
            iperf3 -c "$NAME" -p $((PORT + 2)) -u -b 10M -n 1M -J > datagrams
            /usr/bin/python3 - <<END
import json
end = {name: json.load(open(name))["end"] for name in ("sent", "received", "datagrams")}
assert end["sent"]["sum_sent"]["bytes"] >= 50 << 20, end["sent"]["sum_sent"]
assert end["received"]["sum_received"]["bytes"] >= 50 << 20, end["received"]["sum_received"]
assert end["datagrams"]["sum"]["packets"] > 700 and end["datagrams"]["sum"]["lost_percent"] < 1, end["datagrams"]["sum"]
print("all of it came")
END
        "#,
        prints: &["all of it came"],
    },
    App {
        name: "tftp",
        packages: &["tftpd-hpa", "tftp-hpa"],
        ports: &[69],
        protocols: &["udp"],
        // It answers each request from a new port.
        serve: r#"
            mkdir -p files
            cp "$PAYLOAD" files/payload
            exec in.tftpd -L --secure -u root -c -a "0.0.0.0:$PORT" "$PWD/files"
        "#,
        client: r#"
            for family in 4 6; do
                tftp -$family "$NAME" "$PORT" -m binary -c get payload "got$family"
                cmp "got$family" "$PAYLOAD"
                tftp -$family "$NAME" "$PORT" -m binary -c put "got$family" "sent$family"
                cmp "$SERVED/files/sent$family" "$PAYLOAD"
                echo "the same by IPv$family"
            done
        "#,
        prints: &["the same by IPv4", "the same by IPv6"],
    },
    App {
        name: "powerdns",
        packages: &["pdns-server", "pdns-backend-bind", "bind9-dnsutils"],
        ports: &[5300],
        protocols: &["tcp", "udp"],
        serve: r#"
            mkdir -p config
            {
                printf '$TTL 60\n@ IN SOA ns admin 1 60 60 60 60\n@ IN NS ns\nns IN A 192.0.2.53\nwww IN A 192.0.2.80\n'
                echo "word IN TXT $WORD"
                for number in $(seq 3000); do echo "host$number IN A 192.0.2.1"; done
                for number in $(seq 100); do echo "many IN A 192.0.2.$number"; done
            } > zone
            echo "zone \"example.org\" { type master; file \"$PWD/zone\"; };" > config/named.conf
            {
                printf 'launch=bind\nlocal-address=0.0.0.0\nlocal-port=%s\nsocket-dir=%s\n' "$PORT" "$PWD"
                printf 'bind-config=%s/config/named.conf\nallow-axfr-ips=0.0.0.0/0,::/0\nsecurity-poll-suffix=\n' "$PWD"
            } > config/pdns.conf
            exec pdns_server --config-dir="$PWD/config" --daemon=no --guardian=no
        "#,
        client: r#"
            ask() { dig "@$NAME" -p "$PORT" +short +tries=1 +time=5 "$@"; }
            echo "by UDP: $(ask +notcp www.example.org)"
            echo "by TCP: $(ask +tcp word.example.org TXT)"
            # Too long for a datagram: the answer says so, and is asked for again by TCP.
            echo "long: $(ask many.example.org | wc -l)"
            echo "zone: $(ask axfr example.org | grep -c '^192.0.2.1$')"
        "#,
        prints: &["by UDP: 192.0.2.80", "by TCP: \"WORD\"", "long: 100", "zone: 3001"],
    },
    App {
        name: "memcached",
        packages: &["memcached", "libmemcached-tools"],
        ports: &[11_211],
        protocols: &["tcp"],
        serve: r#"exec memcached -u root -l 0.0.0.0 -p "$PORT" -I 8m"#,
        client: r#"
            echo "$WORD" > word
            cp "$PAYLOAD" payload
            memccp --servers="$NAME:$PORT" word payload
            memccat --servers="$NAME:$PORT" word
            memccat --servers="$NAME:$PORT" --file=got payload
            cmp got payload
            memccapable -h "$NAME" -p "$PORT" -a
            memcslap --servers="$NAME:$PORT" --concurrency=10 --execute-number=500 --test=get
        "#,
        prints: &["WORD", "All tests passed"],
    },
    App {
        name: "openssh",
        packages: &["openssh-server", "openssh-client"],
        ports: &[2222],
        protocols: &["tcp"],
        // The shell of a session reads no start-up file of the machine's own root, which may wait for a minute.
        serve: r#"
            ssh-keygen -q -t ed25519 -N '' -f host_key
            ssh-keygen -q -t ed25519 -N '' -f user_key
            mkdir -p /run/sshd
            exec /usr/sbin/sshd -D -e -f /dev/null -p "$PORT" -h "$PWD/host_key" -o "AuthorizedKeysFile=$PWD/user_key.pub" \
                -o StrictModes=no -o UsePAM=no -o PidFile=none -o "SetEnv=HOME=$PWD" -o "Subsystem=sftp internal-sftp"
        "#,
        client: r#"
            echo "[$NAME]:$PORT $(cut -d ' ' -f 1,2 "$SERVED/host_key.pub")" > known
            options=(-F /dev/null -i "$SERVED/user_key" -o UserKnownHostsFile="$PWD/known" -o StrictHostKeyChecking=yes)
            ssh "${options[@]}" -p "$PORT" "root@$NAME" "echo $WORD on \$(hostname)"
            scp -q "${options[@]}" -P "$PORT" "$PAYLOAD" "root@$NAME:$SERVED/sent"
            cmp "$SERVED/sent" "$PAYLOAD"
            scp -q "${options[@]}" -P "$PORT" "root@$NAME:$SERVED/sent" got
            cmp got "$PAYLOAD"
        "#,
        prints: &["WORD on server"],
    },
    App {
        name: "postgresql",
        packages: &["postgresql"],
        ports: &[5433],
        protocols: &["tcp"],
        serve: r#"
            programs=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
            chown postgres .
            # It refuses to be root.
            as=(setpriv --reuid=postgres --regid=postgres --clear-groups)
            "${as[@]}" "$programs/initdb" -N -D data -A trust -U postgres
            echo "host all all all trust" >> data/pg_hba.conf
            exec "${as[@]}" "$programs/postgres" -D data -p "$PORT" -k "$PWD" -c "listen_addresses=*" -c fsync=off
        "#,
        client: r#"
            ask() { psql -h "$NAME" -p "$PORT" -U postgres -At "$@"; }
            programs=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
            until ask -c "select 1" > /dev/null 2> said; do grep -q "starting up" said; sleep 0.1; done
            "$programs/pgbench" -h "$NAME" -p "$PORT" -U postgres -i -q postgres
            "$programs/pgbench" -h "$NAME" -p "$PORT" -U postgres -c 4 -t 250 postgres
            ask -c "select case when sum(tbalance) = (select sum(delta) from pgbench_history) then 'balanced' end \
                from pgbench_tellers"
            seq 100000 | ask -c "create table numbers (n int)" -c "copy numbers from stdin"
            ask -c "copy numbers to stdout" | cmp - <(seq 100000)
            ask -c "select '$WORD'"
        "#,
        prints: &["processed: 1000/1000", "balanced", "WORD"],
    },
    App {
        name: "redis",
        packages: &["redis-server", "redis-tools"],
        ports: &[6379],
        protocols: &["tcp"],
        serve: r#"exec redis-server --port "$PORT" --bind 0.0.0.0 --protected-mode no --save '' --dir "$PWD""#,
        client: r#"
            ask() { redis-cli -h "$NAME" -p "$PORT" --raw "$@"; }
            ask set word "$WORD"
            ask get word
            ask -x set payload < "$PAYLOAD"
            # It ends its answer with a line's end.
            ask get payload | head -c -1 | cmp - "$PAYLOAD"
            redis-benchmark -h "$NAME" -p "$PORT" -n 5000 -c 20 -t incr -q
            echo "counted $(ask get counter:__rand_int__)"
        "#,
        prints: &["WORD", "counted 5000"],
    },
    App {
        name: "netcat",
        packages: &["netcat-openbsd"],
        ports: &[9001],
        protocols: &["tcp"],
        serve: r#"exec nc -l -k 0.0.0.0 "$PORT" > received"#,
        client: r#"
            nc -N "$NAME" "$PORT" < "$PAYLOAD"
            echo "$WORD" | nc -N "$NAME" "$PORT"
            until [ "$(tail -c $((${#WORD} + 1)) "$SERVED/received")" = "$WORD" ]; do sleep 0.02; done
            cmp -n "$(stat -c %s "$PAYLOAD")" "$SERVED/received" "$PAYLOAD"
            tail -n 1 "$SERVED/received" | grep -ao "$WORD"
        "#,
        prints: &["WORD"],
    },
    App {
        name: "socat",
        packages: &["socat"],
        ports: &[9002],
        protocols: &["tcp", "udp"],
        serve: r#"
            socat "UDP-LISTEN:$PORT,fork" EXEC:cat &
            exec socat "TCP-LISTEN:$PORT,fork,reuseaddr" EXEC:sha256sum
        "#,
        // One direction is closed before the other begins.
        client: r#"
            [ "$(socat -t 20 - "TCP:$NAME:$PORT" < "$PAYLOAD")" = "$(sha256sum < "$PAYLOAD")" ]
            echo "$WORD" | socat -t 1 - "UDP:$NAME:$PORT"
        "#,
        prints: &["WORD"],
    },
    App {
        name: "rsync",
        packages: &["rsync"],
        ports: &[8730],
        protocols: &["tcp"],
        serve: r#"
            mkdir -p tree/deep uploads
            cp "$PAYLOAD" tree/deep/payload
            for number in $(seq 500); do echo "$WORD $number" > "tree/file$number"; done
            printf 'use chroot = no\nuid = root\ngid = root\n[tree]\npath = %s/tree\n' "$PWD" > rsyncd.conf
            printf '[uploads]\npath = %s/uploads\nread only = no\n' "$PWD" >> rsyncd.conf
            exec rsync --daemon --no-detach --address=0.0.0.0 --port="$PORT" --config=rsyncd.conf
        "#,
        client: r#"
            rsync -a "rsync://$NAME:$PORT/tree/" got/
            diff -r got "$SERVED/tree"
            rsync -a got/ "rsync://$NAME:$PORT/uploads/"
            diff -r got "$SERVED/uploads"
            cat got/file500
        "#,
        prints: &["WORD 500"],
    },
    App {
        name: "git",
        packages: &["git"],
        ports: &[9418],
        protocols: &["tcp"],
        serve: r#"
            export GIT_AUTHOR_NAME=lab GIT_AUTHOR_EMAIL=lab@example.org GIT_COMMITTER_NAME=lab GIT_COMMITTER_EMAIL=lab@example.org
            git init -q repository
            cp "$PAYLOAD" repository/payload
            for number in $(seq 20); do
                echo "$WORD $number" > repository/word
                git -C repository add .
                git -C repository commit -q -m "number $number"
            done
            exec git daemon --export-all --base-path="$PWD" --listen=0.0.0.0 --port="$PORT" --enable=receive-pack
        "#,
        client: r#"
            git clone -q "git://$NAME:$PORT/repository" got
            git -C got fsck --strict
            cmp got/payload "$PAYLOAD"
            git -C got push -q origin HEAD:refs/heads/pushed
            [ "$(git -C "$SERVED/repository" rev-parse pushed)" = "$(git -C got rev-parse HEAD)" ]
            git -C got log --oneline | wc -l
            cat got/word
        "#,
        prints: &["20\n", "WORD 20"],
    },
    App {
        name: "mqtt",
        packages: &["mosquitto", "mosquitto-clients"],
        ports: &[1884],
        protocols: &["tcp"],
        serve: r#"
            printf 'listener %s 0.0.0.0\nallow_anonymous true\nuser root\n' "$PORT" > mosquitto.conf
            exec mosquitto -c mosquitto.conf
        "#,
        // A session that stays, so that nothing is lost between the two.
        client: r#"
            seq -f "$WORD %.0f" 200 > words
            sub() { mosquitto_sub -h "$NAME" -p "$PORT" -t words -q 1 -c -i lab "$@"; }
            sub -E
            mosquitto_pub -h "$NAME" -p "$PORT" -t words -q 1 -l < words
            # A broker keeps a hundred for a client that is away.
            sub -C 100 > got
            cmp got <(head -n 100 words)
            mosquitto_pub -h "$NAME" -p "$PORT" -t payload -r -f "$PAYLOAD"
            mosquitto_sub -h "$NAME" -p "$PORT" -t payload -C 1 -N | cmp - "$PAYLOAD"
            tail -n 1 got
        "#,
        prints: &["WORD 100"],
    },
    App {
        name: "smtp",
        packages: &["python3-aiosmtpd", "msmtp"],
        ports: &[8025],
        protocols: &["tcp"],
        serve: r#"
            exec /usr/bin/python3 -m aiosmtpd -n -l "0.0.0.0:$PORT" -s 0 -c aiosmtpd.handlers.Mailbox "$PWD/mail"
        "#,
        client: r#"
            base64 "$PAYLOAD" > body
            { printf 'From: a@example.org\nTo: b@example.org\nSubject: %s\n\n' "$WORD"; cat body; } |
                msmtp --host="$NAME" --port="$PORT" --auth=off --tls=off --from=a@example.org b@example.org
            sed '1,/^$/d' "$SERVED"/mail/new/* | cmp - body
            grep -h '^Subject' "$SERVED"/mail/new/*
        "#,
        prints: &["Subject: WORD"],
    },
    App {
        name: "ftp",
        packages: &["vsftpd", "lftp"],
        ports: &[2121, 2122],
        protocols: &["tcp"],
        serve: r#"
            mkdir -p files empty
            cp "$PAYLOAD" files/payload
            cat > vsftpd.conf <<END
listen=YES
listen_port=$PORT
background=NO
anonymous_enable=YES
no_anon_password=YES
anon_root=$PWD/files
secure_chroot_dir=$PWD/empty
pasv_min_port=2122
pasv_max_port=2122
ftp_username=ftp
seccomp_sandbox=NO
END
            exec vsftpd "$PWD/vsftpd.conf"
        "#,
        client: r#"
            lftp -e "set net:max-retries 1; set net:timeout 10; get payload -o got; ls; bye" "ftp://$NAME:$PORT"
            cmp got "$PAYLOAD"
        "#,
        prints: &["3000000", "payload"],
    },
    App {
        name: "snmp",
        packages: &["snmpd", "snmp"],
        ports: &[1161],
        protocols: &["udp"],
        serve: r#"
            printf 'rocommunity public default\nrocommunity6 public default\nsysName %s\n' "$WORD" > snmpd.conf
            exec snmpd -f -Lo -C -c snmpd.conf -p "$PWD/snmpd.pid" "udp:0.0.0.0:$PORT"
        "#,
        client: r#"
            snmpget -v2c -c public "udp:$NAME:$PORT" .1.3.6.1.2.1.1.5.0
            snmpget -v2c -c public "udp6:$NAME:$PORT" .1.3.6.1.2.1.1.5.0 | sed 's/^/by IPv6: /'
            echo "walked $(snmpbulkwalk -v2c -c public "udp:$NAME:$PORT" .1.3.6.1.2.1.1 | grep -c '= ')"
        "#,
        prints: &["STRING: \"WORD\"", "by IPv6:", "walked "],
    },
];
