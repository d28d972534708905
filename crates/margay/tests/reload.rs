//! An agent that runs follows its configuration: `margay reload`, SIGHUP, and `margay up` with an edited file.

mod host;

use host::{BY_HAND, Host};

/// Words for what follows: the file is written anew from what is given.
const WORDS: &str = r#"
trap 'margay down >/dev/null 2>&1 || true' EXIT
cp "$dir/margay.toml" "$dir/first.toml"
configure() { cat "$dir/first.toml" - >"$dir/margay.toml"; }
status() { margay status --json; }
serves() { margay service list | grep "^$1 " >/dev/null; }
epoch() { status | sed -n 's/^ *"epoch": \([0-9]*\),$/\1/p'; }
await() { for _ in {1..200}; do if "$@"; then return 0; fi; sleep 0.05; done; echo "never: $*"; exit 1; }
margay up --router >/dev/null
margay id authority create shop >/dev/null
"#;

fn on_a_router(script: &str) {
    Host::new(Some(BY_HAND)).boot("", &format!("{WORDS}\n{script}"));
}

#[test]
fn services_come_and_go_with_the_file() {
    on_a_router(
        r#"
        configure <<<$'[[service]]\nname = "web.shop"\nlisten = "0.0.0.0:54324"'
        margay reload >"$dir/said"; said 'changed: [[service]]'; serves web.shop
        margay reload >"$dir/said"; said 'says what the agent does already'

        # What was ordered stays, and so does what an order has changed of a section that says the same.
        margay service publish adm.shop --listen 0.0.0.0:54324 >/dev/null
        margay service set web.shop --weight 7 >/dev/null
        configure <<<$'[[service]]\nname = "web.shop"\nlisten = "0.0.0.0:54324"
            [[service]]\nname = "new.shop"\nlisten = "[::]:54324"'
        margay up >"$dir/said"; said 'the agent runs already'; said 'changed: [[service]]'
        serves new.shop; serves adm.shop
        margay service list | grep '^web.shop .* 100/7 ' >/dev/null

        configure </dev/null
        margay reload --json >"$dir/said"; said '"changed": ['
        ! serves web.shop; ! serves new.shop; serves adm.shop
        margay up >"$dir/said"; said 'as the configuration says'
        "#,
    );
}

#[test]
fn a_broken_file_changes_nothing() {
    on_a_router(
        r#"
        configure <<<$'[[service]]\nname = "web.shop"\nlisten = "0.0.0.0:54324"'
        margay reload >/dev/null; serves web.shop
        for wrong in 'wait = 1' $'[log]\nlevel = "loud"' '[' $'[join]\ntoken_file = "/no/such"' \
            $'[[service]]\nname = "one.shop"\nlisten = "0.0.0.0:54324"\n[[service]]\nname = "two.shop"\nlisten = "no"'; do
            configure <<<"$wrong"
            refused margay reload; said 'nothing has changed'
            serves web.shop; ! serves one.shop
            [ "$(status | grep -c '"joined": true')" = 1 ]
        done
        configure <<<'wait = 1'
        refused margay reload; said "$dir/margay.toml, line 4"; said 'unknown field'
        refused margay up; said 'unknown field'; serves web.shop
        # Nobody is there to be told.
        kill -HUP "$(cat /run/margay/agent.lock)"
        await grep 'is not read again' /run/margay/agent.log; serves web.shop
        "#,
    );
}

#[test]
fn a_signal_and_another_file_are_followed() {
    on_a_router(
        r#"
        configure <<<$'[log]\nlevel = "debug"'
        kill -HUP "$(cat /run/margay/agent.lock)"
        await grep 'read again.*log. level' /run/margay/agent.log

        cp "$dir/first.toml" "$dir/other.toml"
        printf '[[service]]\nname = "web.shop"\nlisten = "0.0.0.0:54324"\n' >>"$dir/other.toml"
        "$margay_program" --config "$dir/other.toml" up >"$dir/said"; said 'changed: [[service]], [log] level'; serves web.shop
        # From now on that one is read.
        cp "$dir/first.toml" "$dir/other.toml"
        kill -HUP "$(cat /run/margay/agent.lock)"
        gone() { ! serves web.shop; }; await gone

        # Nobody but root writes what an agent obeys.
        chmod 666 "$dir/other.toml"; cp "$dir/other.toml" "$dir/third.toml"; chmod 666 "$dir/third.toml"
        refused "$margay_program" --config "$dir/third.toml" reload; said 'nobody else may write'
        refused "$margay_program" --config "$dir/fourth.toml" reload; said 'fourth.toml'
        "#,
    );
}

#[test]
fn what_cannot_change_live_is_named_and_a_restart_does_it() {
    on_a_router(
        r#"
        before=$(epoch); pid=$(cat /run/margay/agent.lock)
        sed '1i direct = false' "$dir/first.toml" | sed '/^\[host\]/a name = "lynx"' >"$dir/margay.toml"
        margay reload >"$dir/said"; said 'not yet: direct, [host] name'; said 'margay up --restart'
        margay up >"$dir/said"; said 'not yet: direct, [host] name'
        [ "$(epoch)" = "$before" ]
        margay up --restart >"$dir/said"; said 'started again, for: direct, [host] name'
        after=$(epoch); [ "$after" -gt "$before" ]; [ "$(cat /run/margay/agent.lock)" = "$pid" ]
        margay up --restart >"$dir/said"; said 'as the configuration says'
        [ "$(epoch)" = "$after" ]

        printf '[dns]\nzone = "other.internal"\n' >>"$dir/margay.toml"
        margay up >"$dir/said"; said 'not yet: [dns] zone'; said 'margay down'
        sed -i '/^direct/d' "$dir/margay.toml"
        refused margay up --restart; said '[dns] zone'; [ "$(epoch)" = "$after" ]
        margay down >/dev/null; as_before down
        "#,
    );
}

#[test]
fn a_host_becomes_a_router_while_it_runs_and_lost_changes_come_back() {
    Host::new(Some(BY_HAND)).boot(
        "",
        r#"
        trap 'margay down >/dev/null 2>&1 || true' EXIT
        margay up >/dev/null; pid=$(cat /run/margay/agent.lock)
        margay status --json | grep '"router": false' >/dev/null
        margay up --router >"$dir/said"; said 'started again, for: [router] enabled'
        margay status --json | grep '"router": true' >/dev/null
        [ "$(cat /run/margay/agent.lock)" = "$pid" ]
        margay up >"$dir/said"; said 'the agent runs already'
        margay status --json | grep '"router": true' >/dev/null

        kill -STOP "$pid"; ip rule del from 198.18.0.1 table 54324; kill -CONT "$pid"
        margay up >/dev/null; changed
        margay down >/dev/null; as_before down
        "#,
    );
}

#[test]
fn metrics_follow_the_file() {
    on_a_router(
        r#"
        measures() { curl -sf --max-time 5 "http://127.0.0.1:$1/metrics" | grep '^margay_' >/dev/null; }
        at() { configure <<<$'[metrics]\nlisten = "'"$1"'"'; }
        before=$(epoch)
        at 127.0.0.1:9100; margay reload >"$dir/said"; said 'changed: [metrics] listen'; measures 9100
        # The old address is part of the new one.
        at 0.0.0.0:9100; margay reload >/dev/null; measures 9100

        coproc taken { python3 -c '
import socket, sys
taken = socket.create_server(("127.0.0.1", 9200))
print("ready", flush=True)
sys.stdin.read()'; }
        read -r ready <&"${taken[0]}"; [ "$ready" = ready ]
        at 127.0.0.1:9200
        refused margay reload; said 127.0.0.1:9200; said 'nothing has changed'; measures 9100
        # What is refused later takes metrics back, too.
        at 127.0.0.1:9300; printf '[join]\ntoken_file = "/no/such"\n' >>"$dir/margay.toml"
        refused margay reload; measures 9100; ! measures 9300
        configure </dev/null
        margay reload >/dev/null; ! measures 9100; [ "$(epoch)" = "$before" ]
        "#,
    );
}

#[test]
fn resolvers_follow_the_file() {
    on_a_router(
        r#"
        resolver() { printf '[[resolver]]\nname = "%s"\nkind = "static"\nfile = "%s"\nnames = ["%s"]\n' "$@"; }
        rule() { margay route list | grep "^[0-9]*  *$1 .* $2 " >/dev/null; }
        before=$(epoch)
        echo 'far.shop 10.1.0.9' >"$dir/hosts"
        resolver hosts "$dir/hosts" far.shop | configure
        margay reload >"$dir/said"; said 'changed: [[resolver]]'; rule far.shop hosts
        timeout 1 bash -c 'exec 3<>/dev/tcp/far.shop.sal.internal/80' 2>/dev/null || true
        margay route list >"$dir/said"; said 'resolver hosts (static): asked 1 time, 1 answered'
        margay route add own.shop delay hosts >/dev/null; rule own.shop hosts
        id() { margay route list | sed -n 's/^\([0-9]*\) *far.shop .*/\1/p'; }
        kept=$(id)

        # What the file says the same of goes on; the rest comes and goes.
        { resolver more "$dir/hosts" near.shop; resolver hosts "$dir/hosts" far.shop; } | configure
        margay reload >/dev/null; rule near.shop more; rule far.shop hosts; [ "$(id)" = "$kept" ]
        resolver hosts "$dir/other" near.shop | configure
        margay reload >/dev/null; rule near.shop hosts; ! rule far.shop hosts; ! rule near.shop more; rule own.shop hosts

        # One that cannot be used changes nothing.
        { resolver fine "$dir/hosts" fine.shop
          printf '[[resolver]]\nname = "dns"\nkind = "dns"\nservers = ["10.1.0.7"]\nzone = "example.org"\n'
          printf 'names = ["dns.shop"]\npublish = ["dns.shop"]\nkey_file = "/no/such"\n'; } | configure
        refused margay reload; said 'the resolver dns cannot be used'; said /no/such; said 'nothing has changed'
        rule near.shop hosts; ! rule fine.shop fine

        printf '[[resolver]]\nname = "dht"\nkind = "dht"\nnames = ["dht.shop"]\nbootstrap = ["10.1.0.7:6881"]\n' | configure
        margay reload >"$dir/said"; said 'changed: [[resolver]]'; said 'not yet: [[resolver]] of the kind dht'
        ! rule near.shop hosts; ! rule dht.shop dht
        # The operator's rule is the operator's, and says what it lacks.
        rule own.shop hosts
        refused margay route add more.shop delay hosts; said 'margay reload'
        [ "$(epoch)" = "$before" ]
        "#,
    );
}

#[test]
fn a_token_for_another_authority_of_the_same_name_is_refused() {
    on_a_router(
        r#"
        token=$(margay id token create shop)
        margay down >/dev/null
        sed 's|/state"|/other-state"|' "$dir/first.toml" >"$dir/margay.toml"
        margay up --router >/dev/null
        margay id authority create shop >/dev/null
        refused margay up --join "$token"
        said "$dir/other-state/keys/authority/shop.key"
        [ -e "$dir/other-state/keys/authority/shop.key" ]
        [ "$(status | grep -c '"authority": "shop"')" = 0 ]
        "#,
    );
}
