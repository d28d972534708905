//! Compiles the eBPF programs and makes their skeleton.

use std::env;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

const SOURCE: &str = "bpf/flow_cache.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("flow_cache.skel.rs");
    // Debian keeps the kernel's architecture headers in a directory of their own, which clang does not look at for BPF.
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let headers = format!("/usr/include/{architecture}-linux-gnu");
    let mut arguments = vec!["-Wall".to_owned(), "-Werror".to_owned(), "-mcpu=v3".to_owned()];
    if Path::new(&headers).is_dir() {
        arguments.push(format!("-I{headers}"));
    }
    if let Err(error) = SkeletonBuilder::new().source(SOURCE).clang_args(arguments).build_and_generate(&out) {
        panic!(
            "the eBPF programs do not build; clang, libelf-dev and zlib1g-dev are needed (scripts/setup): {error:?}"
        );
    }
}
