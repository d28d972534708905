//! Records in literal bytes, damaged, and drawn.

use proptest::prelude::*;

use super::*;

/// A record whose numbers are easy to find among its bytes.
pub(super) fn sample() -> TcpRecord {
    TcpRecord {
        family: Family::V6,
        state: State::CloseWait,
        receive_sequence: 0x0102_0304,
        send_sequence: 0x0506_0708,
        unsent_len: 1,
        mss: 1400,
        scales: Some(WindowScales { send: 7, receive: 9 }),
        timestamp: Some(0x1112_1314),
        selective_acks: true,
        ecn: false,
        reading_is_shut: false,
        window: Window {
            update_sequence: 0x0102_0300,
            send_len: 0x1_0000,
            send_max_len: 0x2_0000,
            receive_len: 0x3_0000,
            receive_from: 0x0102_0304,
        },
        options: options(),
        receive_queue: b"ab".to_vec(),
        send_queue: b"xyz".to_vec(),
    }
}

fn options() -> SocketOptions {
    SocketOptions {
        non_blocking: true,
        reuses_address: true,
        shares_port: false,
        keepalive: true,
        keepalive_idle_s: 7200,
        keepalive_interval_s: 75,
        keepalive_probes: 9,
        no_delay: true,
        corked: false,
        user_timeout_ms: 30_000,
        congestion: "cubic".to_owned(),
        linger_s: Some(5),
        receive_buffer: Buffer { len: 131_072, is_set: false },
        send_buffer: Buffer { len: 65_536, is_set: true },
        tos: 0x10,
        traffic_class: 0x20,
        priority: 6,
        urgent_inline: false,
        receive_low_water: 1,
        receive_timeout_us: 1_500_000,
        send_timeout_us: 0,
    }
}

#[test]
fn a_record_in_literal_bytes() {
    let bytes = sample().encode();
    let mut expected = b"MTCP\x01\x06\x08\x00".to_vec();
    // Flags, sequence numbers, unsent bytes, MSS, scales, timestamp.
    expected.extend([0, 0, 0x63, 0x67, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 1, 5, 0x78, 7, 9, 0x11, 0x12, 0x13, 0x14]);
    // Window.
    expected.extend([1, 2, 3, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 1, 2, 3, 4]);
    // Keepalive, TOS, traffic class; user time-out, linger, buffers, priority, low-water mark.
    expected.extend([0x1c, 0x20, 0, 75, 9, 0x10, 0x20, 0, 0, 0, 0x75, 0x30, 0, 0, 0, 5]);
    expected.extend([0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 6, 0, 0, 0, 1]);
    // Time-outs.
    expected.extend([0, 0, 0, 0, 0, 0x16, 0xe3, 0x60, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend(b"\x05cubic\x00\x00\x00\x02ab\x00\x00\x00\x03xyz");
    assert_eq!(bytes, expected);
    assert_eq!(TcpRecord::decode(&bytes), Ok(sample()));
}

#[test]
fn damage_is_found_where_it_is() {
    let bytes = sample().encode();
    let with = |at: usize, byte: u8| {
        let mut damaged = bytes.clone();
        damaged[at] = byte;
        TcpRecord::decode(&damaged).expect_err("it is damaged").at
    };
    // Each byte that is wrong, and where its field begins.
    let damages = [
        (0, b'N', 0),
        (4, 2, 4),
        (5, 5, 5),
        (6, 2, 6),
        (7, 1, 7),
        (8, 1, 8),
        (23, 4, 20),
        (26, 15, 26),
        (27, 15, 27),
        (32, 2, 32),
        (41, 0, 40),
        (44, 0x80, 44),
        (51, 5, 48),
        (52, 0x80, 52),
        (56, 128, 56),
        (59, 1, 59),
        (60, 0x80, 60),
        (64, 0x80, 64),
        (68, 0x80, 68),
        (72, 0x80, 72),
        (76, 0x80, 76),
        (83, 0, 80),
        (84, 1, 84),
        (92, 1, 92),
        (100, 16, 100),
        (102, 0xff, 101),
        (106, 2, 106),
        (112, 1, 112),
    ];
    for (at, byte, field) in damages {
        // The greatest window is 0x20000, and the window 0x10000.
        assert_eq!(with(at, byte), field, "byte {at}");
    }
    for (flag, byte, field) in [(0x66, 11, 26), (0x65, 11, 28)] {
        assert_eq!(with(byte, flag), field, "what has lost its flag");
    }
    assert_eq!(with(10, 0x23), 64, "a linger time without its flag");
    assert_eq!(with(5, 4), 58, "a traffic class of IPv4");
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(TcpRecord::decode(&longer).expect_err("a byte follows").at, bytes.len());
    for len in 0..bytes.len() {
        let error = TcpRecord::decode(&bytes[..len]).expect_err("it ends early");
        assert!(error.at <= len && error.what.starts_with("the record ends"), "{len}: {error}");
    }
}

#[test]
fn without_the_fin_the_window_ends_at_the_same_byte() {
    let record = sample();
    let window = record.window_of_data();
    assert_eq!((window.receive_from, window.receive_len), (0x0102_0303, 0x3_0001));
    let earlier = Window { receive_from: 0x0102_0302, ..record.window };
    assert_eq!(TcpRecord { window: earlier, ..record.clone() }.window_of_data(), earlier);
    let open = TcpRecord { state: State::Established, ..record };
    assert_eq!(open.window_of_data(), open.window);
}

prop_compose! {
    fn any_options()(
        flags in any::<[bool; 9]>(),
        keepalive in (1..=32_767_u16, 1..=32_767_u16, 1..=127_u8),
        classes in any::<(u8, u8)>(),
        numbers in prop::array::uniform4(0..1_u32 << 31),
        linger_s in prop::option::of(0..1_u32 << 31),
        receive_low_water in 1..1_u32 << 31,
        timeouts in prop::array::uniform2(0..=1_u64 << 50),
        congestion in "[!-~]{1,15}",
    ) -> SocketOptions {
        SocketOptions {
            non_blocking: flags[0],
            reuses_address: flags[1],
            shares_port: flags[2],
            keepalive: flags[3],
            keepalive_idle_s: keepalive.0,
            keepalive_interval_s: keepalive.1,
            keepalive_probes: keepalive.2,
            no_delay: flags[4],
            corked: flags[5],
            user_timeout_ms: numbers[0],
            congestion,
            linger_s,
            receive_buffer: Buffer { len: numbers[1], is_set: flags[6] },
            send_buffer: Buffer { len: numbers[2], is_set: flags[7] },
            tos: classes.0,
            traffic_class: classes.1,
            priority: numbers[3],
            urgent_inline: flags[8],
            receive_low_water,
            receive_timeout_us: timeouts[0],
            send_timeout_us: timeouts[1],
        }
    }
}

prop_compose! {
    fn any_record()(
        options in any_options(),
        flags in any::<[bool; 5]>(),
        sequences in any::<(u32, u32)>(),
        window in (0..1_u32 << 30, any::<u32>(), any::<u32>(), 0..1_u32 << 30),
        behind in 0..1_u32 << 30,
        mss in 1..=u16::MAX,
        scales in prop::option::of((0..=14_u8, 0..=14_u8)),
        timestamp in prop::option::of(any::<u32>()),
        queues in prop::array::uniform2(prop::collection::vec(any::<u8>(), 0..300)),
        unsent in any::<prop::sample::Index>(),
    ) -> TcpRecord {
        let [receive_queue, send_queue] = queues;
        let family = if flags[0] { Family::V4 } else { Family::V6 };
        let traffic_class = if flags[0] { 0 } else { options.traffic_class };
        TcpRecord {
            family,
            state: if flags[1] { State::Established } else { State::CloseWait },
            receive_sequence: sequences.0,
            send_sequence: sequences.1,
            unsent_len: unsent.index(send_queue.len() + 1) as u32,
            mss,
            scales: scales.map(|(send, receive)| WindowScales { send, receive }),
            timestamp,
            selective_acks: flags[2],
            ecn: flags[3],
            reading_is_shut: flags[4],
            window: Window {
                update_sequence: sequences.0.wrapping_sub(behind),
                send_len: window.1.min(window.2),
                send_max_len: window.1.max(window.2),
                receive_len: window.0,
                receive_from: sequences.0.wrapping_sub(window.3),
            },
            options: SocketOptions { traffic_class, ..options },
            receive_queue,
            send_queue,
        }
    }
}

proptest! {
    #[test]
    fn every_record_comes_back(record in any_record()) {
        prop_assert_eq!(TcpRecord::decode(&record.encode()), Ok(record));
    }

    #[test]
    fn any_bytes_are_refused_or_are_the_one_encoding(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let bytes = [b"MTCP\x01".as_slice(), &bytes].concat();
        if let Ok(record) = TcpRecord::decode(&bytes) {
            prop_assert_eq!(record.encode(), bytes);
        }
    }

    #[test]
    fn damaged_records_are_refused_or_are_the_one_encoding(
        record in any_record(),
        damages in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        len in any::<prop::sample::Index>(),
    ) {
        let mut bytes = record.encode();
        for (at, byte) in damages {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let cut = &bytes[..len.index(bytes.len())];
        for bytes in [&bytes[..], cut] {
            if let Ok(record) = TcpRecord::decode(bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }
    }
}
