//! Compiles the eBPF programs and makes their skeleton.

use std::env;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

const SOURCES: [&str; 6] = ["flow_cache", "guard", "active_sockets", "unconnected", "service_router", "router_rate"];

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    // Debian keeps the kernel's architecture headers in a directory of their own, which clang does not look at for BPF.
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let headers = format!("/usr/include/{architecture}-linux-gnu");
    let mut arguments = vec!["-Wall".to_owned(), "-Werror".to_owned(), "-mcpu=v3".to_owned()];
    if Path::new(&headers).is_dir() {
        arguments.push(format!("-I{headers}"));
    }
    for name in SOURCES {
        let (source, skeleton) = (format!("bpf/{name}.bpf.c"), out.join(format!("{name}.skel.rs")));
        if let Err(error) = SkeletonBuilder::new().source(source).clang_args(&arguments).build_and_generate(&skeleton) {
            panic!("{name} does not build; clang, libelf-dev and zlib1g-dev are needed (scripts/setup): {error:?}");
        }
    }
}
