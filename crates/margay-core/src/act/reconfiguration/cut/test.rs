use super::*;
use crate::cache::packet::{Parsed, parse};

const FIN: u8 = tcp_flags::FIN;
const RST: u8 = tcp_flags::RST;
const ACK: u8 = tcp_flags::ACK;

/// IPv4 and TCP with NOP, NOP, timestamps (7, 9), and where there are any, NOP, NOP, selective acknowledgements.
fn packet((sequence, acknowledgement): (u32, u32), flags: u8, blocks: &[(u32, u32)], data: &[u8]) -> Vec<u8> {
    let mut options = alloc::vec![1, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9];
    if !blocks.is_empty() {
        options.extend([1, 1, 5, 2 + 8 * blocks.len() as u8]);
        for (left, right) in blocks {
            options.extend(left.to_be_bytes());
            options.extend(right.to_be_bytes());
        }
    }
    let mut tcp = alloc::vec![0x9c, 0x40, 0, 80];
    tcp.extend(sequence.to_be_bytes());
    tcp.extend(acknowledgement.to_be_bytes());
    tcp.extend([(((20 + options.len()) / 4) << 4) as u8, flags, 0x10, 0, 0, 0, 0, 0]);
    tcp.extend(&options);
    tcp.extend(data);
    let tuple = crate::types::tuple::Tuple {
        protocol: 6,
        source: "198.18.0.1:40000".parse().expect("literal"),
        destination: "198.18.1.1:80".parse().expect("literal"),
    };
    crate::cache::packet::build(&tuple, tcp, 0, 64).expect("one family")
}

fn bare(sequence: u32, acknowledgement: u32) -> Vec<u8> {
    packet((sequence, acknowledgement), ACK, &[], b"")
}

/// Numbers, flags, blocks, data.
type Seen = ((u32, u32), u8, Vec<(u32, u32)>, Vec<u8>);

fn seen(packet: &[u8]) -> Seen {
    let tcp = &packet[20..];
    let word = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().expect("four bytes"));
    let header_len = usize::from(tcp[12] >> 4) * 4;
    let options = crate::cache::packet::tcp_options(tcp).filter(|(kind, ..)| *kind == 5);
    let blocks = options.flat_map(|(_, at, len)| (at + 2..at + len).step_by(8).map(|at| (word(at), word(at + 4))));
    ((word(4), word(8)), tcp[13], blocks.collect(), tcp[header_len..].to_vec())
}

fn out(cut: &mut Cut, packet: &[u8]) -> Vec<(Way, Seen)> {
    let Ok(Parsed::Transport(parsed)) = parse(packet) else { panic!("no TCP") };
    cut.egress(&parsed).iter().map(|(way, piece)| (*way, seen(piece))).collect()
}

fn come(cut: &mut Cut, way: Way, packet: &[u8]) -> Arrival {
    let Ok(Parsed::Transport(parsed)) = parse(packet) else { panic!("no TCP") };
    cut.ingress(way, &parsed)
}

fn delivered(cut: &mut Cut, way: Way, packet: &[u8]) -> Seen {
    match come(cut, way, packet) {
        Arrival::Deliver(packet) => seen(&packet),
        other => panic!("{other:?}"),
    }
}

/// An end whose program has sent up to 1000, and of whose peer all is new from 5000 on; it has acknowledged 4000.
fn turned() -> Cut {
    let mut cut = Cut::new(Scales::default());
    assert_eq!(out(&mut cut, &bare(1000, 4000)).len(), 1);
    assert!(cut.may_turn());
    assert!(cut.hear(PeerCut { number: 5000, is_closed: false }).is_empty());
    let told = cut.turn().expect("the new way is told how far this end is");
    assert_eq!(seen(&told), ((1000, 4000), ACK, Vec::new(), Vec::new()));
    assert_eq!(cut.own(), Some(1000));
    cut
}

#[test]
fn who_has_not_shown_what_it_has_sent_does_not_turn() {
    let mut cut = Cut::new(Scales::default());
    out(&mut cut, &packet((500, 1), ACK, &[], b"said again"));
    assert!(!cut.may_turn() && cut.turn().is_none() && cut.own().is_none());
    out(&mut cut, &bare(1000, 1));
    // A probe of a closed window shows nothing.
    out(&mut cut, &bare(499, 1));
    assert!(cut.may_turn() && cut.turn().is_some());
    assert_eq!(cut.own(), Some(1000));
}

#[test]
fn bytes_go_by_their_numbers_and_what_is_on_both_sides_of_the_cut_is_two() {
    let mut cut = turned();
    let old = out(&mut cut, &packet((990, 4000), ACK, &[], b"0123456789"));
    assert_eq!(old, [(Way::Old, ((990, 4000), ACK, Vec::new(), b"0123456789".to_vec()))]);
    let both = out(&mut cut, &packet((995, 4000), ACK | FIN, &[], b"0123456789"));
    assert_eq!(both.len(), 2);
    assert_eq!(both[0], (Way::Old, ((995, 4000), ACK, Vec::new(), b"01234".to_vec())));
    assert_eq!(both[1], (Way::New, ((1000, 4000), ACK | FIN, Vec::new(), b"56789".to_vec())));
    let new = out(&mut cut, &packet((1000, 4000), ACK, &[], b"new"));
    assert_eq!(new, [(Way::New, ((1000, 4000), ACK, Vec::new(), b"new".to_vec()))]);
}

/// Urgent data stays where it is in the stream, whichever part has it; a part before it announces it.
#[test]
fn urgent_data_stays_where_it_is_in_the_stream() {
    const URG: u8 = 0x20;
    let mut cut = turned();
    // From 995 on; the cut is at 1000. The pointer is to the number after the urgent byte.
    for (pointer, old, new) in [
        (3, Some(3), None),
        (5, Some(5), None),
        (6, Some(6), Some(1)),
        (10, Some(10), Some(5)),
        (700, Some(700), Some(695)),
    ] {
        let mut whole = packet((995, 4000), ACK | URG, &[], b"0123456789");
        whole[20 + 18..20 + 20].copy_from_slice(&u16::to_be_bytes(pointer));
        let Ok(Parsed::Transport(parsed)) = parse(&whole) else { panic!("no TCP") };
        let parts = cut.egress(&parsed);
        let pointers = parts.iter().map(|(_, part)| {
            let pointer = u16::from_be_bytes([part[20 + 18], part[20 + 19]]);
            assert!(part[20 + 13] & URG != 0 || pointer == 0, "without the flag it says nothing");
            (part[20 + 13] & URG != 0).then_some(pointer)
        });
        assert_eq!(pointers.collect::<Vec<_>>(), [old, new], "{pointer}");
    }
}

#[test]
fn a_fin_is_a_byte() {
    let mut cut = turned();
    // Everything below the cut was sent again, and the end is new.
    let both = out(&mut cut, &packet((990, 4000), ACK | FIN, &[], b"0123456789"));
    assert_eq!(both[0].1.1, ACK);
    assert_eq!(both[1], (Way::New, ((1000, 4000), ACK | FIN, Vec::new(), Vec::new())));
    let mut closed = Cut::new(Scales::default());
    out(&mut closed, &packet((990, 1), ACK | FIN, &[], b"012345678"));
    out(&mut closed, &bare(1000, 1));
    closed.turn().expect("it may");
    let again = out(&mut closed, &packet((990, 1), ACK | FIN, &[], b"012345678"));
    assert_eq!(again, [(Way::Old, ((990, 1), ACK | FIN, Vec::new(), b"012345678".to_vec()))]);
}

#[test]
fn acknowledgements_go_by_the_way_of_what_they_acknowledge() {
    let mut cut = turned();
    // Below: the old way, and the new one hears how wide the window is.
    let below = out(&mut cut, &bare(1000, 4500));
    assert_eq!(
        below.iter().map(|(way, seen)| (*way, seen.0)).collect::<Vec<_>>(),
        [(Way::Old, (1000, 4500)), (Way::New, (1000, 4500))]
    );
    // The same again asks the old way for more.
    assert_eq!(out(&mut cut, &bare(1000, 4500)), [(Way::Old, ((1000, 4500), ACK, Vec::new(), Vec::new()))]);
    // Beyond: the new one, and the old one is told once that all is here.
    let beyond = out(&mut cut, &bare(1000, 5800));
    assert_eq!(
        beyond.iter().map(|(way, seen)| (*way, seen.0)).collect::<Vec<_>>(),
        [(Way::Old, (1000, 5000)), (Way::New, (1000, 5800))]
    );
    assert!(cut.has_all_of_old());
    assert_eq!(out(&mut cut, &bare(1000, 5800)), [(Way::New, ((1000, 5800), ACK, Vec::new(), Vec::new()))]);
    // It has not heard so, and says something again.
    delivered(&mut cut, Way::Old, &packet((4990, 1000), ACK, &[], b"0123456789"));
    assert_eq!(out(&mut cut, &bare(1000, 5800))[0], (Way::Old, ((1000, 5000), ACK, Vec::new(), Vec::new())));
}

#[test]
fn a_segment_whose_data_and_acknowledgement_differ_is_two() {
    let mut cut = turned();
    let old_data = out(&mut cut, &packet((990, 5800), ACK, &[], b"0123456789"));
    assert_eq!(old_data[0], (Way::Old, ((990, 5000), ACK, Vec::new(), b"0123456789".to_vec())));
    assert_eq!(old_data[1], (Way::New, ((1000, 5800), ACK, Vec::new(), Vec::new())));
    let mut cut = turned();
    let new_data = out(&mut cut, &packet((1000, 4700), ACK, &[], b"new"));
    assert_eq!(new_data[0], (Way::Old, ((1000, 4700), ACK, Vec::new(), Vec::new())));
    assert_eq!(new_data[1], (Way::New, ((1000, 4700), ACK, Vec::new(), b"new".to_vec())));
}

#[test]
fn blocks_of_a_selective_acknowledgement_are_parted_at_the_cut() {
    let mut cut = turned();
    let blocks = [(5600, 5700), (4800, 5200), (4500, 4600)];
    let parted = out(&mut cut, &packet((1000, 4100), ACK, &blocks, b""));
    assert_eq!(parted[0], (Way::Old, ((1000, 4100), ACK, alloc::vec![(4800, 5000), (4500, 4600)], Vec::new())));
    assert_eq!(parted[1], (Way::New, ((1000, 4100), ACK, alloc::vec![(5600, 5700), (5000, 5200)], Vec::new())));
    // The number is the same as before, the blocks are not: the new way hears of them.
    let again = out(&mut cut, &packet((1000, 4100), ACK, &blocks[..1], b""));
    assert_eq!(again[0].1.2, []);
    assert_eq!(again[1], (Way::New, ((1000, 4100), ACK, alloc::vec![(5600, 5700)], Vec::new())));
}

#[test]
fn what_comes_by_the_new_way_acknowledges_no_less_than_the_old_one_has() {
    let mut cut = Cut::new(Scales { told: 4, own: None });
    out(&mut cut, &bare(1000, 4000));
    cut.hear(PeerCut { number: 5000, is_closed: false });
    cut.turn().expect("it may");
    delivered(&mut cut, Way::Old, &bare(4000, 900));
    let Arrival::Deliver(raised) = come(&mut cut, Way::New, &packet((5000, 100), ACK, &[(1200, 1300)], b"new")) else {
        panic!("it is data");
    };
    assert_eq!(seen(&raised), ((5000, 900), ACK, alloc::vec![(1200, 1300)], b"new".to_vec()));
    // 800 bytes less are 50 of sixteen bytes each; and no timestamp.
    assert_eq!(raised[34..36], (0x1000_u16 - 50).to_be_bytes());
    assert_eq!(raised[40..52], [1; 12]);
    // A bare one is never out of the window, whatever the old way still has.
    assert_eq!(delivered(&mut cut, Way::New, &bare(9000, 950)).0, (4000, 950));
    // Old data with an old acknowledgement are still taken; without data it is as it was.
    assert_eq!(delivered(&mut cut, Way::Old, &packet((4000, 900), ACK, &[], b"old")).0, (4000, 950));
    assert_eq!(delivered(&mut cut, Way::Old, &bare(4000, 900)).0, (4000, 900));
}

#[test]
fn what_overtakes_the_word_of_the_cut_waits_for_it() {
    let mut cut = Cut::new(Scales::default());
    out(&mut cut, &bare(1000, 4000));
    let early = packet((5000, 1000), ACK, &[], b"new");
    assert_eq!(come(&mut cut, Way::New, &early), Arrival::Nothing);
    assert_eq!(cut.hear(PeerCut { number: 5000, is_closed: false }), [early]);
}

#[test]
fn who_has_left_ends_nothing() {
    let mut cut = turned();
    let reset = packet((4000, 0), RST, &[], b"");
    assert!(matches!(come(&mut cut, Way::Old, &reset), Arrival::Ends(_)), "bytes are missing");
    out(&mut cut, &bare(1000, 5000));
    assert_eq!(come(&mut cut, Way::Old, &reset), Arrival::Nothing);
    assert!(matches!(come(&mut cut, Way::New, &reset), Arrival::Ends(_)));
    // This end's own goes by both.
    let ways: Vec<Way> = out(&mut cut, &reset).iter().map(|(way, _)| *way).collect();
    assert_eq!(ways, [Way::Old, Way::New]);
}

#[test]
fn a_fin_of_the_program_that_leaves_is_none_of_the_session() {
    let mut cut = turned();
    let last = delivered(&mut cut, Way::Old, &packet((4990, 1000), ACK | FIN, &[], b"0123456789"));
    assert_eq!(last, ((4990, 1000), ACK, Vec::new(), b"0123456789".to_vec()));
    // Below the cut it is too early: what was acknowledged there does not come any more.
    assert_eq!(come(&mut cut, Way::Old, &packet((4900, 1000), ACK | FIN, &[], b"0123456789")), Arrival::Lost);
    let mut closed = Cut::new(Scales::default());
    out(&mut closed, &bare(1000, 4000));
    closed.hear(PeerCut { number: 5000, is_closed: true });
    let fin = delivered(&mut closed, Way::Old, &packet((4990, 1000), ACK | FIN, &[], b"012345678"));
    assert_eq!(fin, ((4990, 1000), ACK | FIN, Vec::new(), b"012345678".to_vec()));
    assert_eq!(come(&mut closed, Way::Old, &packet((4980, 1000), ACK | FIN, &[], b"")), Arrival::Lost);
}

#[test]
fn numbers_wrap() {
    let mut cut = Cut::new(Scales::default());
    out(&mut cut, &bare(0xffff_fffe, 0xffff_fff0));
    cut.hear(PeerCut { number: 2, is_closed: false });
    cut.turn().expect("it may");
    let both = out(&mut cut, &packet((0xffff_fffc, 1), ACK, &[], b"0123456"));
    assert_eq!((both[0].1.0, &both[0].1.3[..]), ((0xffff_fffc, 1), &b"01"[..]));
    assert_eq!((both[1].1.0, &both[1].1.3[..]), ((0xffff_fffe, 1), &b"23456"[..]));
    assert!(!cut.has_all_of_old());
    out(&mut cut, &bare(3, 2));
    assert!(cut.has_all_of_old());
}

proptest::proptest! {
    /// Whatever is sent in whatever pieces: each byte goes once, by the way of its number.
    #[test]
    fn every_byte_goes_by_the_way_of_its_number(starts in proptest::collection::vec((0_u32..60, 0_u32..40), 1..30)) {
        let base = 0xffff_ffe0_u32;
        let cut_at = base.wrapping_add(50);
        let mut cut = Cut::new(Scales::default());
        out(&mut cut, &bare(cut_at, 1));
        cut.hear(PeerCut { number: 100, is_closed: false });
        cut.turn().expect("it may");
        for (start, len) in starts {
            let data: Vec<u8> = (start..start + len).map(|at| at as u8).collect();
            let pieces = out(&mut cut, &packet((base.wrapping_add(start), 1), ACK, &[], &data));
            let mut carried = Vec::new();
            for (way, ((sequence, _), _, _, bytes)) in pieces {
                for (at, byte) in bytes.iter().enumerate() {
                    let number = sequence.wrapping_add(at as u32);
                    proptest::prop_assert_eq!(u32::from(*byte), number.wrapping_sub(base));
                    proptest::prop_assert_eq!(way == Way::Old, before(number, cut_at));
                    carried.push(*byte);
                }
            }
            proptest::prop_assert_eq!(carried, data);
        }
    }

    /// Nothing that an authenticated peer or a program says makes it panic.
    #[test]
    fn no_bytes_make_it_panic(
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 40..120),
        ways in proptest::collection::vec(proptest::prelude::any::<u8>(), 6),
    ) {
        let mut cut = turned();
        let mut packet = bytes;
        (packet[0], packet[6], packet[7], packet[9]) = (0x45, 0, 0, 6);
        let len = (packet.len() as u16).to_be_bytes();
        packet[2..4].copy_from_slice(&len);
        if let Ok(Parsed::Transport(parsed)) = parse(&packet) {
            for way in ways {
                match way % 3 {
                    0 => drop(cut.egress(&parsed)),
                    1 => drop(cut.ingress(Way::Old, &parsed)),
                    _ => drop(cut.ingress(Way::New, &parsed)),
                }
            }
        }
    }
}

/// An end as [`turned`] whose program's TCP has room up to 4000 and 4096 more.
fn turned_with_window() -> Cut {
    let mut cut = Cut::new(Scales { told: 0, own: Some(0) });
    out(&mut cut, &bare(1000, 4000));
    cut.hear(PeerCut { number: 5000, is_closed: false });
    cut.turn().expect("it may");
    cut
}

#[test]
fn what_the_programs_tcp_has_no_room_for_waits_and_comes_in_order() {
    let mut cut = turned_with_window();
    let data = |sequence: u32| packet((sequence, 900), ACK, &[], &[7; 200]);
    assert_eq!(delivered(&mut cut, Way::New, &data(7896)).3.len(), 200, "it ends at the edge");
    for sequence in [8296, 8096, 8296] {
        let told = delivered(&mut cut, Way::New, &data(sequence));
        assert!(told.3.is_empty(), "{told:?}: it waits, and what it acknowledges does not");
    }
    assert!(cut.take_opened().is_empty());
    out(&mut cut, &bare(1000, 4199));
    assert!(cut.take_opened().is_empty(), "a byte is missing");
    out(&mut cut, &bare(1000, 4400));
    let opened: Vec<u32> = cut.take_opened().iter().map(|packet| seen(packet).0.0).collect();
    assert_eq!(opened, [8096, 8296]);
    assert!(cut.take_opened().is_empty());
}

#[test]
fn what_waits_for_room_is_bounded_and_given_in_the_end() {
    let mut cut = turned_with_window();
    let data = |number: u32| packet((10_000 + number * 1000, 900), ACK, &[], &[7; 1000]);
    let all = 2000;
    let given = (0..all).filter(|number| !delivered(&mut cut, Way::New, &data(*number)).3.is_empty()).count();
    let waiting = cut.give_up_waiting();
    assert_eq!(given + waiting.len(), all as usize);
    let bytes: usize = waiting.iter().map(Vec::len).sum();
    assert!((BEYOND_MAX - 2000..=BEYOND_MAX).contains(&bytes), "{bytes}");
    // The clock is that of another program until there is one way again.
    assert!(waiting.iter().all(|packet| seen(packet).3.len() == 1000 && packet[42] != 8));
}

#[test]
fn an_end_that_does_not_know_its_programs_windows_has_nothing_wait() {
    let mut cut = turned();
    let far = packet((1_000_000, 900), ACK, &[], b"far");
    assert_eq!(delivered(&mut cut, Way::New, &far).3, b"far");
}

/// The same as [`turned`], and order is kept.
fn ordered() -> Cut {
    let mut cut = Cut::new(Scales { told: 0, own: Some(7) }).in_order(true);
    out(&mut cut, &bare(1000, 4000));
    cut.hear(PeerCut { number: 5000, is_closed: false });
    cut.turn().expect("it may");
    cut
}

#[test]
fn where_order_is_kept_new_data_wait_for_the_last_of_the_old_ones() {
    let mut cut = ordered();
    let [first, second] = [packet((5000, 1000), ACK, &[], b"new"), packet((5003, 1010), ACK | FIN, &[], b"newer")];
    for early in [&second, &first, &first] {
        let given = delivered(&mut cut, Way::New, early);
        assert_eq!((given.0.0, given.3), (4000, Vec::new()), "what it acknowledges need not wait");
    }
    delivered(&mut cut, Way::Old, &packet((4500, 1000), ACK, &[], &[0; 500]));
    assert!(cut.take_opened().is_empty(), "some of the old are missing");
    delivered(&mut cut, Way::Old, &packet((4000, 1000), ACK, &[], &[0; 500]));
    assert!(cut.take_opened().is_empty(), "what lay behind the gap was not noted, and the program has said nothing");
    out(&mut cut, &bare(1000, 5000));
    assert_eq!(cut.take_opened(), [first, second], "once each, in order");
    assert_eq!(delivered(&mut cut, Way::New, &packet((5003, 1010), ACK, &[], b"newer")).3, b"newer");
}

#[test]
fn where_order_is_kept_what_finds_no_room_is_dropped() {
    let mut cut = ordered();
    let long = [7; 60_000];
    for number in 0..100 {
        let given = delivered(&mut cut, Way::New, &packet((5000 + number * 60_000, 1000), ACK, &[], &long));
        assert!(given.3.is_empty(), "nothing of the new way comes before the old one is empty");
    }
    delivered(&mut cut, Way::Old, &packet((4000, 1000), ACK, &[], &[0; 1000]));
    let whole: usize = cut.give_up_waiting().iter().map(Vec::len).sum();
    assert!((BEYOND_ORDERED_MAX - 60_100..=BEYOND_ORDERED_MAX).contains(&whole), "{whole}");
}
