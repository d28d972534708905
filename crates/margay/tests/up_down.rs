//! `margay up --host-only` and `margay down` on a host of their own. What `down` leaves must be what `up` found.

mod host;

use host::{BY_HAND, Host};

#[test]
fn down_brings_everything_back_and_again() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r"
        margay up --dry-run >/dev/null; as_before 'a dry run'
        for round in 1 2; do
            margay up --host-only >/dev/null; changed
            margay up --host-only >$dir/again; changed
            [ ! -s $dir/again ] || { cat $dir/again; echo 'a second up found something to do'; exit 1; }
            if margay up --dry-run | grep '^would'; then echo 'a dry run after up finds something to do'; exit 1; fi
            margay down >/dev/null; as_before down
            margay down >/dev/null; as_before 'a second down'
        done
        ",
    );
}

#[test]
fn a_host_without_resolv_conf_has_none_afterwards() {
    Host::new(None).boot("", "margay up --host-only >/dev/null; changed; margay down >/dev/null; as_before down");
}

#[test]
fn a_link_comes_back_as_a_link() {
    let host = Host::new(None);
    let target = host.dir.path().join("others.conf");
    std::fs::write(&target, "nameserver 192.0.2.54\n").expect("written");
    std::os::unix::fs::symlink(&target, host.dir.path().join("etc/resolv.conf")).expect("linked");
    host.boot("", "margay up --host-only >/dev/null; changed; margay down >/dev/null; as_before down");
    assert_eq!(std::fs::read_to_string(&target).expect("there"), "nameserver 192.0.2.54\n");
}

#[test]
fn a_crash_in_the_middle_is_undone_from_wherever_it_got() {
    // `up` writes its journal first, then works downwards. So a crash is: the whole journal, and the last of its
    // changes not made. Each step takes one more of them back by hand.
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        original=$(cat /etc/resolv.conf; echo x); original=${original%x}
        steps=(
            'printf %s "${changed_file:0:40}" >/etc/resolv.conf'
            'printf "" >/etc/resolv.conf'
            'printf %s "$original" >/etc/resolv.conf'
            'echo 20000-20010,30000 >/proc/sys/net/ipv4/ip_local_reserved_ports'
            'ip rule del from 198.18.0.1 lookup 54324'
            'ip route flush table 54324'
            'ip link set sal0 down'
            'ip addr flush dev sal0'
            'ip link del sal0; ip -6 rule del from fd5a:4c00::1 lookup 54324'
            'nft delete table inet margay'
        )
        for mend in 'true' 'margay up --host-only >/dev/null; changed'; do
            for ((last = 0; last < ${#steps[@]}; last++)); do
                margay up --host-only >/dev/null; changed
                changed_file=$(cat /etc/resolv.conf)
                for ((at = 0; at <= last; at++)); do eval "${steps[at]}"; done
                eval "$mend"
                margay down >/dev/null; as_before "a crash (${steps[last]}), $mend, down"
            done
        done
        "#,
    );
}

#[test]
fn a_reboot_leaves_the_file_to_restore_and_nothing_else() {
    let restored = |host: &Host| {
        let now = std::fs::read_to_string(host.dir.path().join("etc/resolv.conf")).expect("there");
        assert_eq!(now, BY_HAND);
        assert!(!host.dir.path().join("state/host-changes.json").exists());
    };
    let another_boot = r#"sed -i 's/"boot_id": ".*"/"boot_id": "earlier"/' "$journal""#;
    let host = Host::new(Some(BY_HAND));
    let up = format!("margay up --host-only >/dev/null; changed; {another_boot}");

    host.boot("", &up);
    host.boot("", "margay down >/dev/null");
    restored(&host);

    // What the first `up` found is what comes back, not what the second one did.
    host.boot("", &up);
    host.boot("", &up);
    host.boot("", "margay up --host-only >/dev/null; changed; margay down >/dev/null");
    restored(&host);
}

#[test]
fn a_host_without_ipv6_gets_none() {
    let no_ipv6 =
        "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6";
    Host::new(Some(BY_HAND)).boot(
        no_ipv6,
        r"
        margay up --host-only >/dev/null; changed
        if ip -6 rule show | grep fd5a; then echo 'an IPv6 rule on a host without IPv6'; exit 1; fi
        margay down >/dev/null; as_before down
        ",
    );
}

#[test]
fn what_others_changed_meanwhile_stays() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r"
        margay up --host-only >/dev/null; changed
        echo 'nameserver 192.0.2.99' >>/etc/resolv.conf
        echo 40000,54324 >/proc/sys/net/ipv4/ip_local_reserved_ports
        margay down >$dir/said; said 'only the agent'
        [ $(cat /proc/sys/net/ipv4/ip_local_reserved_ports) = 40000 ]
        grep 192.0.2.99 /etc/resolv.conf >/dev/null
        if grep 198.18 /etc/resolv.conf; then exit 1; fi
        ",
    );
}

#[test]
fn what_was_there_before_is_not_taken_away() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        # A port that the operator has reserved already.
        echo 30000,54324 >/proc/sys/net/ipv4/ip_local_reserved_ports
        snapshot >"$dir/before"
        margay up --host-only >/dev/null; changed
        echo 30000,40000,54324 >/proc/sys/net/ipv4/ip_local_reserved_ports
        margay down >/dev/null
        [ "$(cat /proc/sys/net/ipv4/ip_local_reserved_ports)" = 30000,40000,54324 ]
        "#,
    );
}

#[test]
fn a_responder_that_moved_leaves_no_line_behind() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        margay up --host-only >/dev/null; changed
        printf '\n[dns]\nlisten = "127.0.0.7:53"\n' >>"$dir/margay.toml"
        margay up --host-only >/dev/null
        [ "$(sed -n 's/^nameserver //p' /etc/resolv.conf)" = 127.0.0.7 ]
        margay down >/dev/null; as_before 'a responder that moved'
        "#,
    );
}

#[test]
fn the_responder_leaves_port_53_alone_and_outlives_whoever_is_killed() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        trap 'margay down >/dev/null 2>&1 || true' EXIT
        margay up >/dev/null; changed
        ip link show sal-dns >/dev/null; found web.shop 'at first'
        python3 -c '
import socket
for family, any in (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"):
    for kind in socket.SOCK_DGRAM, socket.SOCK_STREAM:
        socket.socket(family, kind).bind((any, 53))'
        [ "$(responders | wc -l)" = 2 ]

        kill -9 $(responders --worker); found web.shop 'after the one that answers was killed'
        kill -9 $(responders); found other.shop 'after both were killed'
        ip link del sal-dns
        for try in {1..200}; do getent ahostsv4 more.shop.sal.internal >/dev/null && break; done
        found more.shop 'after its interface was removed'

        kill -9 "$(cat /run/margay/agent.lock)"; found more.shop 'without an agent'
        margay up >/dev/null; found new.shop 'with the next agent'
        margay check >"$dir/said" || { cat "$dir/said"; exit 1; }
        kill -9 "$(cat /run/margay/agent.lock)" $(responders)
        margay up >/dev/null; found web.shop 'with all processes new'

        margay down >/dev/null; as_before down
        [ -z "$(responders)" ]; [ ! -e /run/margay/responder.sock ]
        "#,
    );
}

#[test]
fn a_host_that_cannot_have_namespaces_has_the_responder_at_sal0_and_says_so() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        margay() { setpriv --bounding-set=-sys_admin "$margay_program" --config "$dir/margay.toml" "$@"; }
        trap 'margay down >/dev/null 2>&1 || true' EXIT
        margay up >"$dir/said"; said 'the DNS responder answers at 198.18.0.1:53'
        [ "$(sed -n 's/^nameserver //p' /etc/resolv.conf)" = 198.18.0.1 ]
        if ip link show sal-dns 2>/dev/null; then exit 1; fi
        ip rule show | grep '^500:.*from 198.18.0.1 sport 53 lookup main' >/dev/null
        found web.shop 'at sal0'
        grep 'no interface of its own' /run/margay/agent.log >/dev/null
        margay check >"$dir/said" || { cat "$dir/said"; exit 1; }
        said 'the DNS responder answers at 198.18.0.1:53'
        kill -9 $(responders --worker); found web.shop 'after the one that answers was killed'
        kill -9 "$(cat /run/margay/agent.lock)"; found web.shop 'without an agent'
        margay down >/dev/null; as_before down
        "#,
    );
}

#[test]
fn what_cannot_be_done_is_refused_and_changes_nothing() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        # Another user of the same host: what would change may be seen, not done.
        unshare -U "$margay_program" --config "$dir/margay.toml" up --dry-run >"$dir/said"; said 'would make the virtual interface sal0'
        said 'tcx at sal0 and at every network card'
        refused unshare -U "$margay_program" --config "$dir/margay.toml" up --host-only; said 'needs root'
        as_before 'up without root'

        ip link add sal0 type veth peer name other0
        refused margay up --host-only; said "is not Margay's"
        refused margay up --dry-run; said "is not Margay's"
        ip link del sal0
        as_before 'up with another sal0'

        mkdir -m 700 "$dir/state"
        echo '{' >"$journal"
        refused margay up --host-only; said 'host-changes.json'
        refused margay down; said 'host-changes.json'
        rm "$journal"
        as_before 'a damaged journal'

        # A change in the middle is refused: all before it are undone.
        mount --bind -o ro /proc/sys/net/ipv4 /proc/sys/net/ipv4
        mount -o remount,ro,bind /proc/sys/net/ipv4
        refused margay up --host-only; said 'nothing was left behind'
        umount /proc/sys/net/ipv4
        margay down >/dev/null; as_before 'a refused change'

        mount -t tmpfs none /dev/net
        refused margay up --host-only; said '/dev/net/tun'
        as_before 'up without TUN'
        "#,
    );
}

#[test]
fn ipv6_has_one_neighbour_for_all_virtual_addresses() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        margay up --host-only >/dev/null
        for last in 1 2 3; do echo x >/dev/udp/fd5a:4c00::9:$last/9; done
        ip -6 neigh show nud all dev sal0 | grep '^fe80::1 '
        if ip -6 neigh show nud all dev sal0 | grep '^fd5a'; then echo 'a neighbour of its own'; exit 1; fi

        # Routes as an earlier version made them give way.
        ip -6 route replace fd5a:4c00::/32 dev sal0 proto static src fd5a:4c00::1
        ip -6 route replace default dev sal0 proto static table 54324
        margay up --host-only >"$dir/said"; said 'route fd5a:4c00::/32 to sal0'; said 'in table 54324'
        [ "$(ip -6 route show fd5a:4c00::/32 | grep -c 'via fe80::1 ')" = 1 ]
        [ "$(ip -6 route show table 54324 | grep -c '')" = 1 ]
        margay up --host-only >"$dir/said"; [ ! -s "$dir/said" ]
        margay down >/dev/null; as_before down
        "#,
    );
}

#[test]
fn an_agent_that_does_not_start_leaves_the_host_as_it_was() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        coproc taken { python3 -c '
import socket, sys
taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
taken.bind(("", 54324))
print("ready", flush=True)
sys.stdin.read()'; }
        read -r ready <&"${taken[0]}"; [ "$ready" = ready ]
        refused margay up; said 54324
        # The cause comes first, and what the agent said before it comes last.
        grep -m1 '×' "$dir/said" | grep 'does not start: .*54324' >/dev/null || { cat "$dir/said"; exit 1; }
        said 'as it was before. Its log is'
        as_before 'up without an agent'

        trap 'margay down >/dev/null 2>&1 || true' EXIT
        # Prepared before: stays so, for the next attempt.
        margay up --host-only >/dev/null; changed
        refused margay up; said 54324; changed
        ip link set sal0 mtu 1400
        refused margay up; said 54324; changed
        margay down >/dev/null; as_before down
        "#,
    );
}

#[test]
fn one_agent_per_host() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        trap 'margay down >/dev/null 2>&1 || true' EXIT
        margay up >"$dir/said"; said 'the agent runs'
        pid=$(cat /run/margay/agent.lock)
        margay up >"$dir/said"; said 'the agent runs already'
        refused margay agent; said "process $pid"
        margay down >"$dir/said"; said 'the agent is stopped'
        [ ! -d "/proc/$pid" ] || grep '^State:.*Z' "/proc/$pid/status"
        as_before down
        margay down >"$dir/said"; said 'no agent ran'
        "#,
    );
}

#[test]
fn down_undoes_what_up_has_done_whatever_the_configuration_says_by_now() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        cp "$dir/margay.toml" "$dir/good.toml"
        sed "s|/state|/other-state|" "$dir/good.toml" >"$dir/other.toml"
        for edited in 'cp $dir/other.toml $dir/margay.toml' 'echo "[" >>$dir/margay.toml'; do
            margay up --host-only >/dev/null; changed
            eval "$edited"
            margay down >"$dir/said"; as_before "$edited, down"
            [ ! -e /run/margay/prepared.json ]
            cp "$dir/good.toml" "$dir/margay.toml"
        done

        # Another state directory would have a second journal, of a host that is prepared already.
        margay up --host-only >/dev/null; changed
        cp "$dir/other.toml" "$dir/margay.toml"
        refused margay up --host-only; said 'is prepared already'; said "$dir/state"; changed
        [ ! -e "$dir/other-state/host-changes.json" ]
        margay down >/dev/null; as_before down
        "#,
    );
}

#[test]
fn a_broken_configuration_keeps_nobody_from_asking_the_agent() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        trap 'margay down >/dev/null 2>&1 || true' EXIT
        margay up >"$dir/said"; said 'the agent runs'
        echo '[' >>"$dir/margay.toml"
        margay status >"$dir/status" 2>"$dir/said"; said 'left aside'
        grep '^host ' "$dir/status" >/dev/null
        refused margay up; refused margay run --service web.shop -- true
        margay down >"$dir/said" 2>&1; said 'the agent is stopped'
        as_before down
        "#,
    );
}

#[test]
fn output_that_nobody_reads_and_errors_in_files() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        trap 'margay down >/dev/null 2>&1 || true' EXIT
        # The reader is gone before the first line.
        { margay up --dry-run 2>"$dir/said"; echo $? >"$dir/status"; } | true
        [ "$(cat "$dir/status")" = 0 ]; [ ! -s "$dir/said" ]

        long=$dir/$(printf 'directory-%.0s' {1..20})/margay.toml
        status=0; "$margay_program" --config "$long" status 2>"$dir/said" || status=$?
        [ "$status" != 0 ]
        # In one piece: a path that is cut in two is found by no search.
        grep -F "$long" "$dir/said" >/dev/null || { cat "$dir/said"; exit 1; }

        margay up >/dev/null
        status=0; margay run --service web.shop -- /no/such/program 2>"$dir/said" || status=$?
        [ "$status" = 127 ]; said '/no/such/program'
        margay service list >"$dir/said"; ! grep web.shop "$dir/said"
        "#,
    );
}

#[test]
fn check_says_what_does_not_work_and_waits_until_it_does() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        trap 'margay down >/dev/null 2>&1 || true' EXIT
        # Of a disk of its own: it is going to be full.
        mkdir -p "$dir/state"; mount -t tmpfs -o size=16m,mode=700 none "$dir/state"
        status=0; margay check --wait=1s >"$dir/said" 2>&1 || status=$?
        [ "$status" = 1 ]; said 'no agent runs here'

        # One that waits is there before the agent is.
        margay check --wait=60s >"$dir/waited" 2>&1 & waits=$!
        margay up --router >/dev/null
        wait "$waits" || { cat "$dir/waited"; exit 1; }
        grep '^ok *disk' "$dir/waited" >/dev/null

        margay id authority create shop >/dev/null
        margay service publish own.shop --listen 0.0.0.0:54324 >"$dir/said"; said 'own.shop is published: registered'
        margay route add bad.shop drop >/dev/null
        if (exec 3<>/dev/tcp/bad.shop.sal.internal/80) 2>/dev/null; then echo "a rule discards it"; exit 1; fi
        margay check >"$dir/said" || { cat "$dir/said"; exit 1; }
        said 'discards first packets to bad.shop: '; said '`margay route delete'
        said 'to bad.shop:80 failed within the last 5m'; ! grep 'nothing is wrong' "$dir/said"

        cat /dev/zero >"$dir/state/full" 2>/dev/null || true
        refused margay check; said "$dir/state cannot be written: No space left on device"; said '1 failed'
        refused margay check --json
        grep '"looks_at": "whether the state directory' "$dir/said" >/dev/null
        rm "$dir/state/full"; margay check >/dev/null
        margay down >/dev/null

        printf '%s\n' '[[resolver]]' 'name = "corp"' 'kind = "static"' 'file = "/no/such/file"' 'names = ["lost.shop"]' \
            >>"$dir/margay.toml"
        margay up --router >/dev/null
        refused margay check; said 'corp: /no/such/file'
        "#,
    );
}
