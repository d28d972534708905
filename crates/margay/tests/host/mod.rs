//! A host of its own for a test: private user, network and mount namespaces, so that neither this machine's network nor
//! its `/etc`, `/run` and `/var` are touched.

use std::path::PathBuf;
use std::process::Command;

/// A host with a life of its own, and words to speak about it. `$dir` is on disk; everything else goes with the
/// namespaces.
const HOST: &str = r#"
set -euo pipefail
mount --bind "$dir/etc" /etc
# Without /run/systemd, neither systemd nor its resolver of the machine below is ever asked.
mount -t tmpfs none /run
ip link set lo up
ip link add eth0 type veth peer name peer0
# Nothing that comes by itself, and later: no link-local addresses.
for link in eth0 peer0; do
    if [ -e /proc/sys/net/ipv6 ]; then ip link set $link addrgenmode none; fi
    ip link set $link up
done
ip addr add 10.1.0.5/24 dev eth0
if ip -6 addr add fd01::5/64 dev eth0 nodad 2>/dev/null; then
    # Without detection of duplicates, too, the kernel adds its local route a moment later.
    until [ -n "$(ip -6 route show table local fd01::5)" ]; do sleep 0.01; done
fi
ip route add default via 10.1.0.1 dev eth0
ip route add 10.9.0.0/16 via 10.1.0.1 dev eth0
ip rule add from 10.7.0.0/16 lookup 100 priority 1000
echo 20000-20010,30000 >/proc/sys/net/ipv4/ip_local_reserved_ports

margay() { "$margay_program" --config "$dir/margay.toml" "$@"; }

snapshot() {
    for family in -4 -6; do
        ip $family -o addr show
        ip $family rule show
        ip $family route show table all
    done
    ip -d -o link show
    stat -c '%F %a %u %g %s %N' /etc/resolv.conf 2>/dev/null || true
    # With the last line end, or without it.
    if [ -e /etc/resolv.conf ]; then od -c /etc/resolv.conf; fi
    ls -A /etc
    nft list ruleset
    cat /proc/sys/net/ipv4/ip_local_reserved_ports /proc/sys/net/ipv4/ip_forward
    { grep -r . /proc/sys/net/ipv4/conf /proc/sys/net/ipv6/conf 2>/dev/null || true; } | sort
}

as_before() {
    snapshot >"$dir/now"
    diff "$dir/before" "$dir/now" || { echo "after $1 the host is not as before"; exit 1; }
    [ ! -e "$journal" ] || { echo "after $1 the journal is still there"; exit 1; }
}

changed() {
    snapshot >"$dir/now"
    if diff -q "$dir/before" "$dir/now" >/dev/null; then echo "up changed nothing: its undoing proves \
        nothing"; exit 1; fi
    # Not `grep -q`: it would end before the writer does.
    ip rule show | grep '^501:.*from 198.18.0.1 lookup 54324' >/dev/null
    # In a user namespace there is no eBPF.
    nft list chain inet margay arriving | grep -F 'ip6 daddr fd5a:4c00::/32 counter name "drop_virtual_ingress" drop' >/dev/null
    [ "$(sed -n 's/^nameserver //p' /etc/resolv.conf)" = 198.18.0.2 ]
}

# Processes of the DNS responder of this host: the one that keeps, and the one that answers.
responders() {
    for process in /proc/[0-9]*; do
        [ "$(readlink "$process/ns/net" 2>/dev/null)" = "$(readlink /proc/self/ns/net)" ] || continue
        words=$(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) || continue
        case "$words" in "$margay_program responder "*"${1:-}"*) echo "${process#/proc/}" ;; esac
    done
}

found() {
    getent ahostsv4 "$1.sal.internal" | grep "^198\.18\." >/dev/null || { echo "$1 is not found $2"; exit 1; }
}

refused() {
    if "$@" >"$dir/said" 2>&1; then cat "$dir/said"; echo "not refused: $*"; exit 1; fi
}

said() {
    # Lines of errors are folded.
    tr -s '\n │' ' ' <"$dir/said" | grep -F "$1" >/dev/null || { cat "$dir/said"; echo "does not say: $1"; exit 1; }
}

journal=$dir/state/host-changes.json
snapshot >"$dir/before"
"#;

/// One host, on disk.
pub struct Host {
    /// What is on disk.
    pub dir: tempfile::TempDir,
}

impl Host {
    /// With a resolver's file, or without one.
    pub fn new(resolv_conf: Option<&str>) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let etc = dir.path().join("etc");
        std::fs::create_dir(&etc).expect("made");
        if let Some(text) = resolv_conf {
            std::fs::write(etc.join("resolv.conf"), text).expect("written");
        }
        let config = format!("[host]\nstate_dir = \"{}/state\"\nruntime_dir = \"/run/margay\"\n", dir.path().display());
        std::fs::write(dir.path().join("margay.toml"), config).expect("written");
        Self { dir }
    }

    /// Boots it, in effect: new namespaces over the same disk. `before` runs first, as part of the host's own life.
    pub fn boot(&self, before: &str, script: &str) {
        let output = Command::new("unshare")
            .args(["-rnm", "bash", "-c", &format!("{before}\n{HOST}\n{script}")])
            .env("dir", self.dir.path())
            .env("margay_program", PathBuf::from(env!("CARGO_BIN_EXE_margay")))
            .output()
            .expect("unshare (util-linux) can be run");
        assert!(
            output.status.success(),
            "{script}\n{}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// No line end at the end: it must stay so.
pub const BY_HAND: &str = "# by hand\nsearch example.org\nnameserver 192.0.2.53\noptions timeout:1";
