//! What the agent puts on the kernel while it runs, as `up --dry-run` shows it. It is put on, and taken off, where each
//! part is loaded.

use serde::Serialize;

use crate::config::Config;

/// eBPF programs of one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Programs {
    /// Of which kind, and at which places.
    pub at: &'static str,
    /// What for.
    pub purpose: &'static str,
}

/// What an agent with this configuration would put on, where the kernel lets it.
pub fn programs(config: &Config, is_router: bool) -> Vec<Programs> {
    let of_sockets = Programs {
        at: "a tracepoint of TCP's states; bind and release at the root of the cgroups",
        purpose: "to hear of programs that begin and end to listen",
    };
    if !config.direct {
        return vec![of_sockets];
    }
    let mut all = vec![
        Programs {
            at: "tcx at sal0 and at every network card, a socket lookup in this network namespace",
            purpose: "flows that go direct, and nothing with a virtual address by a card; stays while the agent is \
             dead",
        },
        Programs {
            at: "netfilter's output hook, IPv4 and IPv6",
            purpose: "no reset of the host's own TCP on ports of flows; stays until `down`",
        },
        Programs {
            at: "connect, sendmsg, recvmsg and getpeername at the root of the cgroups",
            purpose: "datagrams of unconnected sockets by name; stays while the agent is dead",
        },
        of_sockets,
    ];
    all.extend(is_router.then_some(Programs {
        at: "XDP in the drivers of the network cards, or tcx",
        purpose: "first packets for services elsewhere",
    }));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_on_goes_by_the_configuration() {
        let mut config = Config::default();
        let count = |config: &Config, is_router| programs(config, is_router).len();
        assert_eq!((count(&config, false), count(&config, true)), (4, 5));
        config.direct = false;
        assert_eq!((count(&config, false), count(&config, true)), (1, 1));
    }
}
