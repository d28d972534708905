//! Literal bytes, and what must hold of sealing whatever comes.

use margay_wire::{FlowId, epochs};
use proptest::prelude::*;

use super::*;
use crate::sample::{peer_seal_keys, seal_keys};

const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A train of one payload, sealed in chunks of `stride` bytes.
fn sealed(seal: &Seal, payload: &[u8], stride: usize) -> Vec<Vec<u8>> {
    let room = stride - DATA_HEADER_LEN - SEAL_TAG_LEN;
    let mut train: Vec<u8> =
        payload.chunks(room).flat_map(|part| [&[0; DATA_HEADER_LEN], part, &[0; SEAL_TAG_LEN]].concat()).collect();
    seal.seal_train(FlowId(0xbeef_0002), &mut train, stride).expect("sealed");
    train.chunks(stride).map(<[u8]>::to_vec).collect()
}

fn open(seal: &Seal, chunk: &[u8]) -> Result<Vec<u8>, DropReason> {
    let mut chunk = chunk.to_vec();
    let header = DataRepr::parse(&chunk).map_err(|_| DropReason::Malformed)?;
    seal.open(&header, &mut chunk)?;
    Ok(chunk[DATA_HEADER_LEN..chunk.len() - SEAL_TAG_LEN].to_vec())
}

#[test]
fn literal_chunks() {
    // Opened as RFC 5116 and RFC 8439 have it, under BLAKE3 of the secret 0x11…; the wire crate's vectors have the
    // same.
    let expected = [
        (
            Cipher::Aes256Gcm,
            [
                "012003a4beef00020000000000000002e4c365d12159d4bd361b4b7951636207b8a7b9e2e0504c41b22c941c037d72ab",
                "012003a4beef00020000000000010002b1ea24333253eca1d7496638d3ee30665801320bcb28d521",
            ],
        ),
        (
            Cipher::ChaCha20Poly1305,
            [
                "012004a4beef000200000000000000024741b914903e4f749cce8ae040b46caefade235fed3e448b3fdda08329ab0225",
                "012004a4beef000200000000000100024ed3773f4ff4440c853573cda9caa48014bc29eabdc6cf8c",
            ],
        ),
    ];
    for (cipher, chunks) in expected {
        let seal = Seal::new(&seal_keys(cipher));
        let found: Vec<String> =
            sealed(&seal, b"one packet in two chunks", 48).iter().map(|chunk| hex(chunk)).collect();
        assert_eq!(found, chunks, "{cipher:?}");
    }
}

#[test]
fn a_chunk_is_opened_once_and_by_its_receiver_alone() {
    for cipher in CIPHERS {
        let (here, there) = (Seal::new(&seal_keys(cipher)), Seal::new(&peer_seal_keys(cipher)));
        let chunks = sealed(&here, &[7; 100], 64);
        assert_eq!(open(&here, &chunks[0]), Err(DropReason::OtherEpoch), "not by its sender");
        for chunk in &chunks {
            assert_eq!(open(&there, chunk).map(|payload| payload.iter().all(|byte| *byte == 7)), Ok(true));
            assert_eq!(open(&there, chunk), Err(DropReason::ReplayedSeal));
        }
        let later = SealKeys { open: [0x33; 32], ..peer_seal_keys(cipher) };
        assert_eq!(open(&Seal::new(&later), &chunks[0]), Err(DropReason::BadSeal), "nor under other keys");
        let later = SealKeys { open_epochs: epochs(5, 10), ..later };
        assert_eq!(open(&Seal::new(&later), &chunks[0]), Err(DropReason::OtherEpoch));
    }
}

#[test]
fn any_changed_bit_is_refused() {
    for cipher in CIPHERS {
        let here = Seal::new(&seal_keys(cipher));
        let chunk = &sealed(&here, b"payload", 64)[0];
        for bit in 0..chunk.len() * 8 {
            let there = Seal::new(&peer_seal_keys(cipher));
            let mut changed = chunk.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&there, &changed).is_err(), "bit {bit}");
            assert!(open(&there, chunk).is_ok(), "a forged chunk leaves no trace");
        }
        for len in 0..chunk.len() {
            assert!(open(&Seal::new(&peer_seal_keys(cipher)), &chunk[..len]).is_err(), "{len} bytes");
        }
    }
}

#[test]
fn keys_change_with_the_phase_and_late_chunks_of_the_older_are_opened() {
    for cipher in CIPHERS {
        let (here, there) = (Seal::new(&seal_keys(cipher)), Seal::new(&peer_seal_keys(cipher)));
        here.next.store((1 << PHASE_BITS) - 2, Ordering::Relaxed);
        // The receiver has seen what is near.
        there.opening.lock().window.note((1 << PHASE_BITS) - 3);
        let trains: Vec<_> = (0..4).map(|n| sealed(&here, &[n; 20], 64)).collect();
        for (n, chunk) in [(2, &trains[2]), (0, &trains[0]), (3, &trains[3]), (1, &trains[1])] {
            assert_eq!(open(&there, &chunk[0]), Ok(vec![n; 20]));
        }
        let mut moved = trains[2][0].clone();
        let number = (u32::from_be_bytes(moved[8..12].try_into().expect("four")) + (1 << PHASE_BITS)).to_be_bytes();
        moved[8..12].copy_from_slice(&number);
        assert_eq!(open(&there, &moved), Err(DropReason::BadSeal));
        assert_eq!(there.opening.lock().current.phase, 1, "a forged chunk moves no key");
    }
}

#[test]
fn two_threads_never_use_a_number_twice() {
    let seal = Seal::new(&seal_keys(Cipher::Aes256Gcm));
    let numbers = std::thread::scope(|scope| {
        let work = || {
            let of = |chunk: &Vec<u8>| u32::from_be_bytes(chunk[8..12].try_into().expect("four"));
            (0..500)
                .flat_map(|n| {
                    let train = sealed(&seal, &vec![1; 1 + n % 100], 64);
                    let count = train.len() as u32;
                    let first = of(&train[0]);
                    first..first + count
                })
                .collect::<Vec<u32>>()
        };
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect::<Vec<u32>>()
    });
    let once: std::collections::BTreeSet<u32> = numbers.iter().copied().collect();
    assert_eq!(once.len(), numbers.len());
    assert_eq!(once.last().copied().map(|last| last as usize + 1), Some(numbers.len()));
}

#[test]
fn whole_numbers_as_rfc_9000_has_them() {
    assert_eq!(whole_number(5, 0), 5);
    assert_eq!(whole_number(0xffff_fff0, 0), 0xffff_fff0);
    assert_eq!(whole_number(3, 0xffff_fffe), 0x1_0000_0003);
    assert_eq!(whole_number(0xffff_fffe, 0x1_0000_0003), 0xffff_fffe);
    assert_eq!(whole_number(0, u64::MAX), 0xffff_ffff_0000_0000);
}

proptest! {
    /// The window takes each number of those near the newest once, and none that is older.
    #[test]
    fn like_a_set(steps in proptest::collection::vec((any::<bool>(), 0u64..6000), 1..400), start in 0u64..1 << 40) {
        let (mut window, mut set) = (Window::default(), std::collections::BTreeSet::new());
        let mut newest = None;
        for (forward, by) in steps {
            let number = match (newest, forward) {
                (None, _) => start,
                (Some(newest), true) => newest + by,
                (Some(newest), false) => u64::saturating_sub(newest, by),
            };
            let is_near = newest.is_none_or(|newest| number > newest || newest + 1 - number <= SPAN);
            prop_assert_eq!(window.is_new(number), is_near && !set.contains(&number));
            if window.is_new(number) {
                window.note(number);
                set.insert(number);
                newest = newest.max(Some(number));
            }
        }
    }

    #[test]
    fn any_whole_number_is_found_again(expected in any::<u64>(), off in -(1i64 << 31) + 1..1 << 31) {
        prop_assume!(expected.checked_add_signed(off).is_some());
        let number = expected.wrapping_add_signed(off);
        prop_assert_eq!(whole_number(number as u32, expected), number);
    }
}
