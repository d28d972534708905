//! How many packets a second the service router forwards, and the kernel's own forwarding beside it: both get first
//! packets that the kernel takes for just arrived, each for a name that is drawn from as many as there are.
#![allow(unsafe_code)]

/// Generated from the object.
#[allow(unsafe_code, missing_docs, unreachable_pub, dead_code, clippy::all, clippy::print_stdout, clippy::unwrap_used)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/router_rate.skel.rs"));
}

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, OpenObject};
use margay_core::name::{Prefix, ServiceId};

use super::ServiceRouter;
use crate::kernel::Unavailable;
use skeleton::{RouterRateSkel, RouterRateSkelBuilder};

/// Bytes of a frame that the generator writes anew each time.
pub const HEAD_LEN: usize = 200;
/// One in so many names has a longer prefix.
const LONGER: u32 = 16;

/// Who gets the packets.
#[derive(Clone, Copy)]
pub enum Next<'a> {
    /// The kernel's own forwarding.
    Kernel,
    /// An interface, as they are.
    Interface(u32),
    /// The service router.
    Router(&'a ServiceRouter),
}

/// Makes packets.
pub struct Generator {
    skeleton: RouterRateSkel<'static>,
    sinks: Vec<OwnedFd>,
}

/// The prefix of name `number`: of 96 bits, or now and then of 128.
pub fn prefix(number: u32) -> Prefix {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&mix(2 * u64::from(number) + 1).to_ne_bytes());
    id[8..16].copy_from_slice(&mix(2 * u64::from(number) + 2).to_ne_bytes());
    Prefix::new(ServiceId(id), if number.is_multiple_of(LONGER) { 128 } else { 96 })
}

fn mix(mut number: u64) -> u64 {
    for multiplier in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        number = (number ^ number >> 31).wrapping_mul(multiplier);
    }
    number ^ number >> 29
}

impl Generator {
    /// Loads it.
    ///
    /// # Errors
    ///
    /// Why the kernel does not take it.
    pub fn open() -> Result<Self, Unavailable> {
        let storage: &'static mut MaybeUninit<OpenObject> = Box::leak(Box::new(MaybeUninit::uninit()));
        let open = RouterRateSkelBuilder::default()
            .open(storage)
            .map_err(|error| Unavailable::system("read the object", error))?;
        let skeleton = open.load().map_err(|error| Unavailable::of_load(&error))?;
        Ok(Self { skeleton, sinks: Vec::new() })
    }

    /// Whatever arrives at this interface is thrown away by its driver, as long as this lives. A veth then takes frames
    /// from programs at its other end, and packets may be said to have arrived here.
    ///
    /// # Errors
    ///
    /// The kernel's word.
    pub fn throw_away(&mut self, ifindex: u32) -> io::Result<()> {
        self.sinks.push(super::attach::put_on(self.skeleton.progs.discard.as_fd(), ifindex)?);
        Ok(())
    }

    /// Has frames begin with `head`, each for one of `names` names.
    ///
    /// # Panics
    ///
    /// `head` is shorter than [`HEAD_LEN`].
    pub fn set_frames(&mut self, head: &[u8], names: u32) {
        let Some(shared) = self.skeleton.maps.data_data.as_deref_mut() else { return };
        shared.names = names;
        let Some(shared) = self.skeleton.maps.bss_data.as_deref_mut() else { return };
        let (words, _) = head[..HEAD_LEN].as_chunks::<8>();
        shared.head.iter_mut().zip(words).for_each(|(place, word)| *place = u64::from_ne_bytes(*word));
    }

    /// Sends `packets` of `len` bytes as if they had arrived at `ingress`. Gives the time that each took on average, in
    /// nanoseconds.
    ///
    /// # Errors
    ///
    /// The kernel's word.
    pub fn run(&mut self, next: Next<'_>, ingress: u32, len: usize, packets: u32) -> io::Result<f64> {
        let zero = 0_u32.to_ne_bytes();
        let put = |program: BorrowedFd<'_>| {
            let program = program.as_raw_fd().to_ne_bytes();
            self.skeleton.maps.next.update(&zero, &program, MapFlags::ANY).map_err(io::Error::other)
        };
        match next {
            // Absent, if there was none before.
            Next::Kernel => drop(self.skeleton.maps.next.delete(&zero)),
            Next::Interface(_) => put(self.skeleton.progs.send_on.as_fd())?,
            Next::Router(router) => put(router.skeleton.lock().progs.route_frame.as_fd())?,
        }
        if let (Next::Interface(index), Some(shared)) = (next, self.skeleton.maps.bss_data.as_deref_mut()) {
            shared.egress_ifindex = index;
        }
        run(self.skeleton.progs.generate.as_fd(), ingress, len, packets)
    }
}

fn run(program: BorrowedFd<'_>, ingress: u32, len: usize, packets: u32) -> io::Result<f64> {
    let frame = vec![0_u8; len];
    let end = u32::try_from(len).map_err(io::Error::other)?;
    let mut context = libbpf_sys::xdp_md { data_end: end, ingress_ifindex: ingress, ..Default::default() };
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: frame.as_ptr().cast(),
        data_size_in: end,
        ctx_in: (&raw mut context).cast(),
        ctx_size_in: size_of_val(&context) as u32,
        repeat: packets.cast_signed(),
        flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
        ..Default::default()
    };
    // SAFETY: the program is open; frame, context and options live across the call, and say their sizes.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    Ok(f64::from(options.duration))
}

impl ServiceRouter {
    /// Lets packets leave by an interface that the program is not on.
    pub fn add_device(&self, ifindex: u32) {
        self.set_devices(&[ifindex]);
    }
}
