//! For tests: what the kernel has done to a packet before it runs a program, which its test run cannot be told of. A
//! few instructions do it, and call the program.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, ProgramMut};

/// An instruction: operation, destination and source register, offset, value.
type Instruction = (u8, u8, u8, i16, i32);

const MOVE: u8 = 0xbf;
const SET: u8 = 0xb7;
const STORE: u8 = 0x63;
const CALL: u8 = 0x85;
const WIDE: u8 = 0x18;
const EXIT: u8 = 0x95;
const MAP_FD: u8 = 1;
const TAIL_CALL: i32 = 12;
const SKB_VLAN_PUSH: i32 = 18;
/// Of `tc_index` in `struct __sk_buff`.
const TC_INDEX: i16 = 44;
/// What a run gives when the program was not called.
const NOT_CALLED: i32 = 77;

/// What is done to a packet first.
#[derive(Clone, Copy, Debug)]
pub enum Before {
    /// It had a VLAN tag with this control information (priority and number), which the kernel has put beside it.
    Tagged(u16),
    /// Its `tc_index` is set.
    Indexed(u16),
}

impl Before {
    fn instructions(self) -> Vec<Instruction> {
        match self {
            Self::Tagged(control) => vec![
                (SET, 2, 0, 0, i32::from(0x8100_u16.to_be())),
                (SET, 3, 0, 0, i32::from(control)),
                (CALL, 0, 0, 0, SKB_VLAN_PUSH),
            ],
            Self::Indexed(index) => vec![(SET, 2, 0, 0, i32::from(index)), (STORE, 1, 2, TC_INDEX, 0)],
        }
    }
}

/// Runs `program` on a frame to which that has happened: verdict, and the frame that came out.
pub fn run(before: Before, program: &ProgramMut<'_>, frame: &[u8]) -> (i32, Vec<u8>) {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    let programs = MapHandle::create(MapType::ProgArray, Some("prelude"), 4, 4, 1, &options).expect("a map");
    let called = program.as_fd().as_raw_fd().to_ne_bytes();
    programs.update(&0_u32.to_ne_bytes(), &called, MapFlags::ANY).expect("of the same type");
    let mut all = vec![(MOVE, 6, 1, 0, 0)];
    all.extend(before.instructions());
    all.extend([
        (MOVE, 1, 6, 0, 0),
        (WIDE, 2, MAP_FD, 0, programs.as_fd().as_raw_fd()),
        (0, 0, 0, 0, 0),
        (SET, 3, 0, 0, 0),
        (CALL, 0, 0, 0, TAIL_CALL),
        (SET, 0, 0, 0, NOT_CALLED),
        (EXIT, 0, 0, 0, 0),
    ]);
    let prelude = load(&all, program.attach_type() as u32);
    let mut out = vec![0; 4096];
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        data_out: out.as_mut_ptr().cast(),
        data_size_out: out.len() as u32,
        ..Default::default()
    };
    // SAFETY: both buffers live across the call, and are as long as they say.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(prelude.as_raw_fd(), &raw mut options) };
    assert_eq!(result, 0, "a run");
    out.truncate(options.data_size_out as usize);
    let verdict = options.retval.cast_signed();
    assert_ne!(verdict, NOT_CALLED, "the program was not called");
    (verdict, out)
}

/// What calls another program is of its type.
fn load(instructions: &[Instruction], attach_type: u32) -> OwnedFd {
    let bytes: Vec<[u8; 8]> = instructions
        .iter()
        .map(|(code, to, from, offset, value)| {
            let (offset, value) = (offset.to_ne_bytes(), value.to_ne_bytes());
            [*code, from << 4 | to, offset[0], offset[1], value[0], value[1], value[2], value[3]]
        })
        .collect();
    let options = libbpf_sys::bpf_prog_load_opts {
        sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as libbpf_sys::size_t,
        expected_attach_type: attach_type,
        ..Default::default()
    };
    // SAFETY: an instruction is eight bytes, and they live across the call; the kernel checks what they say.
    let program = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            ptr::null(),
            c"Dual BSD/GPL".as_ptr(),
            bytes.as_ptr().cast(),
            bytes.len() as libbpf_sys::size_t,
            &raw const options as *mut _,
        )
    };
    assert!(program >= 0, "the verifier takes it: {}", std::io::Error::last_os_error());
    // SAFETY: it was just given to us, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(program) }
}
