//! Properties of any message, not only of those that somebody thought of.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use margay_wire::{DataRepr, GRANT_FLOWS_MAX, Message};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};

use crate::vector::hex;
use crate::{json, mutation};

const TYPES: [&str; 18] = [
    "SYN",
    "SYN_ACK",
    "ACK",
    "RSYN",
    "RSYN_ACK",
    "RSYN_DONE",
    "FIN",
    "RST",
    "FAIL",
    "PROBE",
    "ERROR",
    "REQUEST_LOCK",
    "ACK_LOCK",
    "NACK_LOCK",
    "CANCEL_LOCK",
    "ACK_CANCEL",
    "NOTICE",
    "CHANGE",
];

fn bytes(len: usize) -> impl Strategy<Value = String> {
    vec(any::<u8>(), len).prop_map(|bytes| hex(&bytes))
}

fn some_bytes() -> impl Strategy<Value = String> {
    vec(any::<u8>(), 0..300).prop_map(|bytes| hex(&bytes))
}

fn socket() -> impl Strategy<Value = String> {
    let v4 = any::<[u8; 4]>().prop_map(|octets| Ipv4Addr::from(octets).into());
    let v6 = any::<[u8; 16]>().prop_map(|octets| Ipv6Addr::from(octets).to_canonical());
    (prop_oneof![v4, v6], any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port).to_string())
}

fn grant() -> impl Strategy<Value = Value> {
    let flows = (1..=u32::MAX - 127, 1..=u16::MAX - 127, 1..=GRANT_FLOWS_MAX, any::<u16>());
    flows.prop_map(|(first_flow, port, count, lifetime_ms)| {
        let first_flow = format!("{first_flow:08x}");
        json!({"type": "GRANT", "first_flow": first_flow, "port": port, "count": count, "lifetime_ms": lifetime_ms})
    })
}

/// Says of each box that was added who has: the last one before it that can have, or it was not added. Whether any was.
fn name_adders(boxes: &mut [Value]) -> bool {
    let mut adder = 0;
    let mut has_added = false;
    for (number, one) in (1..).zip(boxes) {
        let flags = one["flags"].as_u64().expect("a number");
        match (flags & 2 != 0, adder) {
            (true, 0) => one["flags"] = json!(flags & !2),
            (true, by) => {
                one["added_by"] = json!(by);
                has_added = true;
            }
            (false, _) => {}
        }
        let is_added = flags & 2 != 0 && adder != 0;
        adder = if flags & 8 != 0 {
            number
        } else if is_added {
            adder
        } else {
            0
        };
    }
    has_added
}

/// Some boxes that were passed or left out, then some that are ahead.
fn chain() -> impl Strategy<Value = Value> {
    let one = |flags: [u8; 4]| {
        (bytes(12), select(flags.to_vec())).prop_map(|(service, flags)| json!({"service": service, "flags": flags}))
    };
    let boxes = (vec(one([4, 5, 8, 10]), 0..4), vec(one([0, 1, 2, 3]), 1..=5));
    let head = (any::<bool>(), 0..=3_u8, 0..=1_u8, bytes(32), any::<u64>(), bytes(32), bytes(64));
    (head, boxes, vec(bytes(16), 4), some_bytes()).prop_map(|(head, (mut boxes, ahead), mut hosts, certificates)| {
        let (is_answer, shared, failed_at, destination, time_s, host_key, signature) = head;
        hosts.truncate(boxes.iter().filter(|one| one["flags"].as_u64().is_some_and(|flags| flags & 8 != 0)).count());
        boxes.extend(ahead);
        let has_added = !is_answer && name_adders(&mut boxes);
        json!({
            "type": if has_added { "CHAIN_ADDED" } else { "CHAIN" }, "is_answer": is_answer,
            "shared": shared, "failed_at": failed_at,
            "destination": destination, "time_s": time_s, "host_key": host_key, "signature": signature,
            "boxes": boxes, "hosts": hosts, "certificates": certificates,
        })
    })
}

fn handover() -> impl Strategy<Value = Value> {
    (bytes(16), bytes(16), bytes(16), socket()).prop_map(|(ticket, giver, taker, address)| {
        json!({"type": "HANDOVER", "ticket": ticket, "giver": giver, "taker": taker, "address": address})
    })
}

fn change() -> impl Strategy<Value = Value> {
    (1..=8_u8, any::<(u8, bool, bool, u32)>()).prop_map(|(step, (stack, demands, by_rule, number))| {
        json!({
            "type": "CHANGE",
            "step": step,
            "stack": stack,
            "demands": demands,
            "by_rule": by_rule,
            "number": number
        })
    })
}

fn reconfiguration() -> impl Strategy<Value = Value> {
    (1..=15_u8, any::<u32>(), bytes(16), socket()).prop_map(|(step, number, host, address)| {
        json!({"type": "RECONFIGURATION", "step": step, "number": number, "host": host, "address": address})
    })
}

fn splice() -> impl Strategy<Value = Value> {
    let socket = || {
        (any::<(u32, u32, Option<u32>, bool)>(), 0..=14_u8, 0..=14_u8).prop_map(|(numbers, peer_scale, own_scale)| {
            let (unread, written, timestamp, has_sack) = numbers;
            json!({
                "unread": unread, "written": written, "timestamp": timestamp, "peer_scale": peer_scale,
                "own_scale": own_scale, "has_sack": has_sack,
            })
        })
    };
    (bytes(16), bytes(16), bytes(32), socket(), socket()).prop_map(|(host, session, service, left, right)| {
        json!({
            "type": "SPLICE", "host": host, "session": session, "service": service, "left": left, "right": right,
        })
    })
}

fn order() -> impl Strategy<Value = Value> {
    let numbers = (0..=6_u8, 1..=3_u8, any::<(u64, u32)>());
    (numbers, bytes(16), bytes(12), bytes(12), bytes(32), bytes(64)).prop_map(
        |((state, act, (start, said_at_ms)), session, service, other, host_key, signature)| {
            json!({
                "type": "ORDER", "state": state, "act": act, "session": session, "service": service, "other": other,
                "start": start, "said_at_ms": said_at_ms, "host_key": host_key, "signature": signature,
            })
        },
    )
}

fn cut() -> impl Strategy<Value = Value> {
    any::<(u32, bool, bool)>().prop_map(|(number, is_closed, has_heard)| {
        json!({"type": "CUT", "number": number, "is_closed": is_closed, "has_heard": has_heard})
    })
}

fn loss() -> impl Strategy<Value = Value> {
    any::<[u32; 5]>().prop_map(|[basis, sent, expected, received, gaps]| {
        json!({
            "type": "LOSS", "basis": basis, "sent": sent, "expected": expected, "received": received, "gaps": gaps,
        })
    })
}

fn location() -> impl Strategy<Value = Value> {
    (any::<u32>(), bytes(8), bytes(8), socket(), any::<u16>()).prop_map(|(number, token, challenge, address, flags)| {
        json!({
            "type": "MOVE", "number": number, "token": token, "challenge": challenge, "address": address,
            "flags": flags,
        })
    })
}

/// At most one of each, in any order, AUTH last.
fn extensions() -> impl Strategy<Value = Vec<Value>> {
    let session = (bytes(16), socket(), any::<u16>(), any::<u8>()).prop_map(|(session, client, service_port, protocol)| {
        json!({"type": "SESSION", "session": session, "client": client, "service_port": service_port, "protocol": protocol})
    });
    let addresses = vec((socket(), any::<u16>()), 0..5).prop_map(|all| {
        let all: Vec<Value> = all.iter().map(|(address, flags)| json!({"address": address, "flags": flags})).collect();
        json!({"type": "ADDRESSES", "addresses": all})
    });
    let capabilities = (any::<u32>(), any::<u16>())
        .prop_map(|(stacks, mtu)| json!({"type": "CAPABILITIES", "stacks": stacks, "mtu": mtu}));
    let exchange = (bytes(16), any::<u32>(), some_bytes()).prop_map(|(host_id, assoc_id, message)| {
        json!({"type": "KEY_EXCHANGE", "host_id": host_id, "assoc_id": assoc_id, "message": message})
    });
    let error =
        (any::<u16>(), "\\PC{0,32}").prop_map(|(code, text)| json!({"type": "ERROR", "code": code, "text": text}));
    let first = (
        bytes(32).prop_map(|service| json!({"type": "SOURCE_SERVICE", "service": service})),
        session,
        addresses,
        capabilities,
        exchange,
        some_bytes().prop_map(|chain| json!({"type": "CERTIFICATE", "chain": chain})),
    );
    let second = (
        socket().prop_map(|address| json!({"type": "RENDEZVOUS", "address": address})),
        error,
        bytes(24).prop_map(|cookie| json!({"type": "COOKIE", "cookie": cookie})),
        any::<(u8, bool)>().prop_map(|(stack, demands)| json!({"type": "STACK", "stack": stack, "demands": demands})),
        (any::<u16>(), any::<bool>())
            .prop_map(|(port, starts)| json!({"type": "FLOW_PORT", "port": port, "starts": starts})),
        critical(),
    );
    let places = subsequence((0..4_u8).collect::<Vec<_>>(), 0..=4);
    let arrivals = (any::<u32>(), places, any::<(u32, u32, u32)>()).prop_map(|(number, places, of)| {
        let place = |place| json!({"place": place, "packet_number": of.0, "at_us": of.1, "bytes": of.2});
        json!({"type": "ARRIVALS", "number": number, "places": places.into_iter().map(place).collect::<Vec<_>>()})
    });
    let terms =
        any::<u32>().prop_map(|give_up_after_ms| json!({"type": "TERMS", "give_up_after_ms": give_up_after_ms}));
    let quiet = any::<u32>().prop_map(|quiet_ms| json!({"type": "QUIET", "quiet_ms": quiet_ms}));
    let fence = any::<u64>().prop_map(|number| json!({"type": "FENCE_NUMBER", "number": number}));
    let seen = bytes(32).prop_map(|digest| json!({"type": "SYN_SEEN", "digest": digest}));
    let splices = (splice(), cut(), order());
    let last = (chain(), seen, fence, change(), loss(), timing(), reconfiguration(), splices);
    let third = (location(), stripe(), arrivals, notice(), grant(), terms, handover(), quiet, last);
    let all = (first, second, third).prop_map(
        |(
            (a, b, c, d, e, f),
            (g, h, i, j, k, l),
            (m, n, o, p, q, r, s, t, (u, v, w, x, y, timing, z, (splice, cut, order))),
        )| {
            vec![
                a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, timing, z, splice, cut,
                order,
            ]
        },
    );
    let some = all.prop_flat_map(|all| subsequence(all, 0..=29)).prop_shuffle();
    let auth =
        (any::<u32>(), any::<u32>(), any::<u32>(), bytes(16)).prop_map(|(assoc_id, epoch, receiver_epoch, tag)| {
            json!({
                "type": "AUTH", "assoc_id": assoc_id, "epoch": epoch, "receiver_epoch": receiver_epoch, "tag": tag,
            })
        });
    (some, option::of(auth)).prop_map(|(mut some, auth)| {
        some.extend(auth);
        some
    })
}

/// Critical extensions that nobody knows.
fn critical() -> impl Strategy<Value = Value> {
    let known = [0x86, 0x87, 0x8a, 0x8b, 0x8c, 0x8e, 0x93, 0x96, 0x98, 0x9a, 0xcc, 0xcd, 0xce, 0xec];
    let unknown: Vec<u8> = (0x8d..=0xff).filter(|number| !known.contains(number)).collect();
    select(unknown).prop_map(|number| json!({"type": "UNKNOWN_CRITICAL", "number": number}))
}

fn stripe() -> impl Strategy<Value = Value> {
    let shared = (0..3_u8, any::<u8>());
    (any::<u32>(), 0..4_u8, any::<[bool; 4]>(), shared).prop_map(|(number, place, flags, (sharing, weight))| {
        let [ends, leads, plain, fec] = flags;
        json!({
            "type": "STRIPE", "number": number, "place": place, "ends": ends, "leads": leads, "sharing": sharing,
            "weight": weight, "plain": plain, "fec": fec,
        })
    })
}

fn timing() -> impl Strategy<Value = Value> {
    (any::<[u32; 3]>(), option::of(0..u32::MAX)).prop_map(|([at_us, judged, late], jitter_us)| {
        json!({"type": "TIMING", "at_us": at_us, "jitter_us": jitter_us, "judged": judged, "late": late})
    })
}

fn notice() -> impl Strategy<Value = Value> {
    (any::<(u32, u32, u64, bool)>(), 0..=256_u16, bytes(32), bytes(32), bytes(64)).prop_map(
        |((epoch, sequence, until_s, withdrawn), bits, prefix, host_key, signature)| {
            json!({
                "type": "NOTICE", "epoch": epoch, "sequence": sequence, "until_s": until_s, "bits": bits,
                "withdrawn": withdrawn, "prefix": prefix, "host_key": host_key, "signature": signature,
            })
        },
    )
}

fn resolvable() -> impl Strategy<Value = Value> {
    let (reply_to, via) = (option::of(socket()), option::of(socket()));
    (any::<u8>(), reply_to, via, bytes(32), bytes(8), bytes(8)).prop_map(
        |(hop_limit, reply_to, via, service, nonce, hop_tag)| {
            json!({
                "hop_limit": hop_limit, "reply_to": reply_to, "via": via, "service": service, "nonce": nonce,
                "hop_tag": hop_tag,
            })
        },
    )
}

fn message() -> impl Strategy<Value = Value> {
    let flags = subsequence(vec!["FULL", "CONFIRM", "RELAY", "COPIED", "NAMED"], 0..=5);
    let header = (select(&TYPES[..]), flags, any::<u8>(), bytes(4), bytes(4), any::<u32>(), 0..4_u8);
    let parts = (header, option::of(resolvable()), extensions(), some_bytes(), 0..200_usize);
    parts.prop_map(|(header, resolvable, extensions, payload, padding)| {
        let (kind, mut flags, next_protocol, dst_flow, src_flow, control_seq, unknown_flags) = header;
        if resolvable.is_some() {
            flags.insert(0, "RESOLVABLE");
        }
        let mut fields = json!({
            "header": {
                "type": kind, "flags": flags, "next_protocol": next_protocol, "dst_flow": dst_flow,
                "src_flow": src_flow, "control_seq": control_seq,
            },
            "extensions": extensions, "payload": payload, "padding": padding,
        });
        if unknown_flags != 0 {
            fields["header"]["unknown_flags"] = (unknown_flags << 6).into();
        }
        if let Some(resolvable) = resolvable {
            fields["resolvable"] = resolvable;
        }
        fields
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(fields in message()) {
        let datagram = json::to_message(&fields).expect("well-formed");
        let message = Message::parse(&datagram).expect("ours");
        prop_assert_eq!(json::of_message(&message, datagram.len()), fields);
        prop_assert!(mutation::check(&datagram));
    }

    #[test]
    fn a_byte_changed_is_seen_or_refused(fields in message(), at in any::<prop::sample::Index>(), flip in 1..=255_u8) {
        let mut datagram = json::to_message(&fields).expect("well-formed");
        let at = at.index(datagram.len());
        datagram[at] ^= flip;
        mutation::check(&datagram);
    }

    #[test]
    fn no_bytes_are_too_odd(bytes in vec(any::<u8>(), 0..600)) {
        mutation::check(&bytes);
    }

    #[test]
    fn nor_behind_a_good_header(kind in 0..40_u8, flags in 0..2_u8, len in 20..200_u16, rest in vec(any::<u8>(), 12..300)) {
        let len = len.to_be_bytes();
        let bytes = [&[1, kind, flags, 4, len[0], len[1], 0, 9], &rest[..]].concat();
        mutation::check(&bytes);
    }

    #[test]
    fn data_is_read_as_written(
        stack in any::<u8>(), flags in any::<u8>(), flow in bytes(4), packet_number in any::<u32>(),
        index in prop_oneof![Just(0), 0..u16::MAX],
        more in any::<u16>(), gso in select(&["none", "tcp", "udp"][..]), partial in any::<bool>(), size in 1..u16::MAX,
        inner_len in any::<u32>(), chunk in some_bytes(),
    ) {
        let count = index.saturating_add(more).max(index + 1);
        let mut fields = json!({
            "header": {
                "stack": stack, "flags": flags, "dst_flow": flow, "packet_number": packet_number, "index": index,
                "count": count,
            },
            "chunk": chunk,
        });
        if index == 0 && !margay_wire::is_sealed(stack) && stack != margay_wire::STACK_FEC {
            fields["train"] =
                json!({"gso": gso, "partial_checksum": partial, "segment_size": size, "inner_len": inner_len});
        }
        let datagram = json::to_data(&fields);
        prop_assert_eq!(json::of_data(&datagram).expect("ours"), fields);
        prop_assert!(mutation::check(&datagram));
        let mut outside = datagram.clone();
        outside[12..14].copy_from_slice(&count.to_be_bytes());
        prop_assert!(DataRepr::parse(&outside).is_err(), "behind its train");
    }
}
