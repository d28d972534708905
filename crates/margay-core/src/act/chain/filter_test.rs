//! Filters: programs of libpcap 1.10.3 (`tcpdump -ddd -y RAW`), written out, on packets, written out.

use super::*;

type Listing<'a> = &'a [(u16, u8, u8, u32)];

const TCP_80_FROM_NET: Listing<'static> = &[
    (48, 0, 0, 0),
    (84, 0, 0, 240),
    (21, 16, 0, 96),
    (48, 0, 0, 0),
    (84, 0, 0, 240),
    (21, 0, 13, 64),
    (48, 0, 0, 9),
    (21, 0, 11, 6),
    (40, 0, 0, 6),
    (69, 9, 0, 8191),
    (177, 0, 0, 0),
    (72, 0, 0, 0),
    (21, 2, 0, 80),
    (72, 0, 0, 2),
    (21, 0, 4, 80),
    (32, 0, 0, 12),
    (84, 0, 0, 0xffff_0000),
    (21, 0, 1, 0x0a01_0000),
    (6, 0, 0, 262_144),
    (6, 0, 0, 0),
];
const IP6: Listing<'static> = &[(48, 0, 0, 0), (84, 0, 0, 240), (21, 0, 1, 96), (6, 0, 0, 262_144), (6, 0, 0, 0)];
const UDP: Listing<'static> = &[
    (48, 0, 0, 0),
    (84, 0, 0, 240),
    (21, 0, 2, 64),
    (48, 0, 0, 9),
    (21, 8, 9, 17),
    (48, 0, 0, 0),
    (84, 0, 0, 240),
    (21, 0, 6, 96),
    (48, 0, 0, 6),
    (21, 3, 0, 17),
    (21, 0, 3, 44),
    (48, 0, 0, 40),
    (21, 0, 1, 17),
    (6, 0, 0, 262_144),
    (6, 0, 0, 0),
];
const TCP_SYN: Listing<'static> = &[
    (48, 0, 0, 0),
    (84, 0, 0, 240),
    (21, 0, 8, 64),
    (48, 0, 0, 9),
    (21, 0, 6, 6),
    (40, 0, 0, 6),
    (69, 4, 0, 8191),
    (177, 0, 0, 0),
    (80, 0, 0, 13),
    (69, 0, 1, 2),
    (6, 0, 0, 262_144),
    (6, 0, 0, 0),
];
/// `tcp[((tcp[12] & 0xf0) >> 2):4] = 0x47455420`: data that begin with `GET `.
const TCP_GET: Listing<'static> = &[
    (48, 0, 0, 0),
    (84, 0, 0, 240),
    (21, 0, 13, 64),
    (48, 0, 0, 9),
    (21, 0, 11, 6),
    (40, 0, 0, 6),
    (69, 9, 0, 8191),
    (177, 0, 0, 0),
    (80, 0, 0, 12),
    (84, 0, 0, 240),
    (116, 0, 0, 2),
    (12, 0, 0, 0),
    (7, 0, 0, 0),
    (64, 0, 0, 0),
    (21, 0, 1, 1_195_725_856),
    (6, 0, 0, 262_144),
    (6, 0, 0, 0),
];
/// `src net 2001:db8::/32 and tcp dst portrange 8000-8999`
const V6_PORTS: Listing<'static> = &[
    (48, 0, 0, 0),
    (84, 0, 0, 240),
    (21, 0, 8, 96),
    (32, 0, 0, 8),
    (21, 0, 6, 0x2001_0db8),
    (48, 0, 0, 6),
    (21, 0, 4, 6),
    (40, 0, 0, 42),
    (53, 0, 2, 8000),
    (37, 1, 0, 8999),
    (6, 0, 0, 262_144),
    (6, 0, 0, 0),
];
const ALL: [Listing<'static>; 6] = [TCP_80_FROM_NET, IP6, UDP, TCP_SYN, TCP_GET, V6_PORTS];

/// 10.1.2.3:49152 to 198.18.0.1:80, a SYN, from network 10.1.0.0/16.
const SYN_V4: [u8; 40] = [
    0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 1, 2, 3, 198, 18, 0, 1, // IPv4
    0xc0, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0, // TCP
];
/// 10.1.2.3:49152 to 198.18.0.1:80 over UDP, without payload.
const DATAGRAM_V4: [u8; 28] = [
    0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 1, 2, 3, 198, 18, 0, 1, // IPv4
    0xc0, 0, 0, 80, 0, 8, 0, 0, // UDP
];

/// 2001:db8::1 port 49152 to fd5a:4c00::1 port 8080, a SYN.
fn syn_v6() -> Vec<u8> {
    let mut packet = alloc::vec![0x60, 0, 0, 0, 0, 20, 6, 64];
    packet.extend(core::net::Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).octets());
    packet.extend(core::net::Ipv6Addr::new(0xfd5a, 0x4c00, 0, 0, 0, 0, 0, 1).octets());
    packet.extend([0xc0, 0, 0x1f, 0x90, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0]);
    packet
}

fn bytes(listing: Listing<'_>) -> Vec<u8> {
    let one = |(code, jt, jf, k): &(u16, u8, u8, u32)| {
        let mut bytes = code.to_be_bytes().to_vec();
        bytes.extend([*jt, *jf]);
        bytes.extend(k.to_be_bytes());
        bytes
    };
    listing.iter().flat_map(one).collect()
}

fn parse(listing: Listing<'_>) -> Result<Program, ProgramError> {
    Program::parse(&bytes(listing))
}

fn returned(listing: Listing<'_>, packet: &[u8]) -> Option<u32> {
    parse(listing).expect("sound").run(packet)
}

#[test]
fn expressions_of_libpcap_describe_what_they_say() {
    let programs = ALL.map(|listing| parse(listing).expect("libpcap's"));
    let of = |packet: &[u8]| programs.each_ref().map(|program| program.matches(packet));
    //                        80 net  ip6    udp    syn   GET    v6 ports
    assert_eq!(of(&SYN_V4), [true, false, false, true, false, false]);
    assert_eq!(of(&DATAGRAM_V4), [false, false, true, false, false, false]);
    assert_eq!(of(&syn_v6()), [false, true, false, false, false, true]);
    let mut elsewhere = SYN_V4;
    elsewhere[13] = 2;
    assert_eq!(of(&elsewhere), [false, false, false, true, false, false], "from 10.2.2.3");
    let mut other_port = SYN_V4;
    other_port[23] = 81;
    assert_eq!(of(&other_port), [false, false, false, true, false, false]);
    let with_data = [&SYN_V4[..], b"GET / HTTP/1.1"].concat();
    assert_eq!(of(&with_data), [true, false, false, true, true, false]);
    let mut acknowledgement = SYN_V4;
    acknowledgement[33] = 0x10;
    assert_eq!(of(&acknowledgement), [true, false, false, false, false, false]);
}

#[test]
fn a_packet_that_is_too_short_is_none_of_the_described() {
    for listing in ALL {
        let program = parse(listing).expect("libpcap's");
        assert!(!program.matches(&[]));
        assert!(!program.matches(&SYN_V4[..19]) || listing == IP6);
    }
    assert!(!parse(TCP_GET).expect("libpcap's").matches(&SYN_V4), "it has no data");
}

#[test]
fn each_instruction_does_what_classic_bpf_says() {
    let packet = [0x12, 0x34, 0x56, 0x78, 0x9a, 0x45];
    for (listing, wanted) in [
        // ld, ldh, ldb at fixed places
        (&[(0x20, 0, 0, 0), (0x16, 0, 0, 0)][..], Some(0x1234_5678)),
        (&[(0x28, 0, 0, 1), (0x16, 0, 0, 0)], Some(0x3456)),
        (&[(0x30, 0, 0, 4), (0x16, 0, 0, 0)], Some(0x9a)),
        (&[(0x20, 0, 0, 3), (0x16, 0, 0, 0)], None),
        // ldx #1, and ld, ldh, ldb from there
        (&[(0x01, 0, 0, 1), (0x40, 0, 0, 1), (0x16, 0, 0, 0)], Some(0x5678_9a45)),
        (&[(0x01, 0, 0, 1), (0x48, 0, 0, 0), (0x16, 0, 0, 0)], Some(0x3456)),
        (&[(0x01, 0, 0, 1), (0x50, 0, 0, 2), (0x16, 0, 0, 0)], Some(0x78)),
        (&[(0x01, 0, 0, u32::MAX), (0x50, 0, 0, 1), (0x16, 0, 0, 0)], None),
        // ld #7, ld len, ldx len and txa, ldxb 4*([5]&0xf) and txa
        (&[(0x00, 0, 0, 7), (0x16, 0, 0, 0)], Some(7)),
        (&[(0x80, 0, 0, 0), (0x16, 0, 0, 0)], Some(6)),
        (&[(0x81, 0, 0, 0), (0x87, 0, 0, 0), (0x16, 0, 0, 0)], Some(6)),
        (&[(0xb1, 0, 0, 5), (0x87, 0, 0, 0), (0x16, 0, 0, 0)], Some(20)),
        // st M[15], ld M[15]; tax, stx M[0], ldx M[0], txa
        (&[(0x00, 0, 0, 7), (0x02, 0, 0, 15), (0x00, 0, 0, 1), (0x60, 0, 0, 15), (0x16, 0, 0, 0)], Some(7)),
        (
            &[
                (0x00, 0, 0, 7),
                (0x07, 0, 0, 0),
                (0x03, 0, 0, 0),
                (0x01, 0, 0, 1),
                (0x61, 0, 0, 0),
                (0x87, 0, 0, 0),
                (0x16, 0, 0, 0),
            ],
            Some(7),
        ),
        // A division by zero in X ends with no.
        (&[(0x00, 0, 0, 7), (0x3c, 0, 0, 0), (0x16, 0, 0, 0)], None),
        (&[(0x00, 0, 0, 7), (0x84, 0, 0, 0), (0x16, 0, 0, 0)], Some(0_u32.wrapping_sub(7))),
        (&[(0x05, 0, 0, 1), (0x06, 0, 0, 1), (0x06, 0, 0, 2)], Some(2)),
    ] {
        assert_eq!(returned(listing, &packet), wanted, "{listing:?}");
    }
}

#[test]
fn numbers_are_computed_and_compared_with_numbers_and_with_x() {
    for (code, wanted) in [
        (0x04, 16),
        (0x14, 8),
        (0x24, 48),
        (0x34, 3),
        (0x44, 12),
        (0x54, 4),
        (0x64, 192),
        (0x74, 0),
        (0x94, 0),
        (0xa4, 8),
    ] {
        let by_number = [(0x00, 0, 0, 12), (code, 0, 0, 4), (0x16, 0, 0, 0)];
        assert_eq!(returned(&by_number, &[]), Some(wanted), "{code:#x}");
        let by_index = [(0x00, 0, 0, 12), (0x01, 0, 0, 4), (code | 8, 0, 0, 0), (0x16, 0, 0, 0)];
        assert_eq!(returned(&by_index, &[]), Some(wanted), "{code:#x} by X");
    }
    for (code, number, holds) in [
        (0x15, 12, true),
        (0x15, 13, false),
        (0x25, 11, true),
        (0x25, 12, false),
        (0x35, 12, true),
        (0x35, 13, false),
        (0x45, 4, true),
        (0x45, 3, false),
    ] {
        let by_number = [(0x00, 0, 0, 12), (code, 0, 1, number), (0x06, 0, 0, 1), (0x06, 0, 0, 0)];
        assert_eq!(returned(&by_number, &[]), Some(holds.into()), "{code:#x} {number}");
        let by_index = [(0x00, 0, 0, 12), (0x01, 0, 0, number), (code | 8, 0, 1, 0), (0x06, 0, 0, 1), (0x06, 0, 0, 0)];
        assert_eq!(returned(&by_index, &[]), Some(holds.into()), "{code:#x} {number} by X");
    }
}

#[test]
fn what_could_go_wrong_is_no_program() {
    let end = (0x06, 0, 0, 0);
    for (listing, wanted) in [
        (&[][..], ProgramError::Count(0)),
        (&[end; INSTRUCTIONS_MAX + 1], ProgramError::Count(INSTRUCTIONS_MAX + 1)),
        (&[(0x00, 0, 0, 0)], ProgramError::End),
        (&[(0xff, 0, 0, 0), end], ProgramError::Code { at: 0, code: 0xff }),
        // `inbound` of libpcap reads the direction, which is beside the packet.
        (&[(40, 0, 0, 4_294_963_204), end], ProgramError::Beside { at: 0 }),
        // `ip6 protochain 6` jumps back.
        (&[end, (5, 0, 0, 4_294_967_281), end], ProgramError::Jump { at: 1 }),
        (&[(0x05, 0, 0, 1), end], ProgramError::Jump { at: 0 }),
        (&[(0x15, 0, 1, 0), end], ProgramError::Jump { at: 0 }),
        (&[(0x15, 1, 0, 0), end], ProgramError::Jump { at: 0 }),
        (&[(0x02, 0, 0, 16), end], ProgramError::Number { at: 0, number: 16 }),
        (&[(0x34, 0, 0, 0), end], ProgramError::Number { at: 0, number: 0 }),
        (&[(0x64, 0, 0, 32), end], ProgramError::Number { at: 0, number: 32 }),
    ] {
        assert_eq!(parse(listing), Err(wanted));
    }
    assert_eq!(Program::parse(&[0; 9]), Err(ProgramError::Length(9)));
}

/// Programs of which some bytes are others, on packets of which some are: they are refused, or end with yes or no.
#[test]
fn programs_with_other_bytes_are_refused_or_end() {
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut taken = 0;
    for round in 0..60_000 {
        let mut program = bytes(ALL[round % ALL.len()]);
        for _ in 0..=random(4) {
            let at = random(program.len());
            // Codes of instructions, too, and not only what is next to one.
            program[at] = if random(2) == 0 { random(256) as u8 } else { program[random(program.len())] };
        }
        if random(8) == 0 {
            program.truncate(random(program.len()));
        }
        let Ok(program) = Program::parse(&program) else { continue };
        taken += 1;
        let mut packet = if random(2) == 0 { syn_v6() } else { SYN_V4.to_vec() };
        let at = random(packet.len());
        packet[at] = random(256) as u8;
        packet.truncate(random(packet.len() + 1));
        let once = program.run(&packet);
        assert_eq!(program.run(&packet), once, "it says the same again");
    }
    assert!(taken > 1000, "{taken} were programs");
}
