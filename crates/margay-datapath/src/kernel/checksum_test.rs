//! What a card has added up over a packet (CHECKSUM_COMPLETE) stays true when it is rewritten.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::os::fd::AsRawFd;

use libbpf_rs::ProgramMut;

use super::*;

/// `BPF_F_TEST_SKB_CHECKSUM_COMPLETE`, of Linux 6.17: a test run has the sum of a card, and ends in EBADMSG where the
/// program leaves a wrong one.
const CHECKSUM_COMPLETE: u32 = 1 << 2;

/// The verdict, and the IP packet that came out.
pub(super) fn run_with_sum(program: &ProgramMut<'_>, packet: &[u8]) -> io::Result<(i32, Vec<u8>)> {
    let (data, mut out) = (frame(packet), vec![0; 4096]);
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: data.as_ptr().cast(),
        data_size_in: data.len() as u32,
        data_out: out.as_mut_ptr().cast(),
        data_size_out: out.len() as u32,
        flags: CHECKSUM_COMPLETE,
        ..Default::default()
    };
    // SAFETY: the program is open; both buffers and the options live across the call, and say their sizes.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_fd().as_raw_fd(), &raw mut options) };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    out.truncate(options.data_size_out as usize);
    Ok((options.retval.cast_signed(), out.split_off(ETHERNET)))
}

#[test]
fn a_cards_sum_stays_true_between_all_families() {
    for protocol in [TCP, UDP] {
        for app in [sample::tuple4(protocol), sample::tuple6(protocol)] {
            for wire_v4 in [true, false] {
                let Some(rig) = rig(app, wire_v4, true, true) else { return };
                let wire = Tuple { protocol, ..wire(wire_v4) };
                let ways = [
                    (&rig.0.progs.app_egress, app, wire),
                    (&rig.0.progs.wire_ingress, wire.reversed(), app.reversed()),
                ];
                for (program, from, to) in ways {
                    let packet = sample::packet(from, ACK, b"odd", Checksum::Complete);
                    match run_with_sum(program, &packet) {
                        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                            eprintln!("skipped: this kernel makes no test run with the sum of a card");
                            return;
                        }
                        result => {
                            let (verdict, out) = result.unwrap_or_else(|error| panic!("{from} to {to}: {error}"));
                            assert_eq!((verdict, sample::see(&out).tuple), (REDIRECT, to));
                        }
                    }
                }
            }
        }
    }
}
