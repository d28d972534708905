//! Compiles the eBPF programs and makes their skeleton.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

const SOURCES: [&str; 6] = ["flow_cache", "guard", "active_sockets", "unconnected", "service_router", "router_rate"];

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let layout = fs::read_to_string("bpf/layout.h").expect("layout.h can be read");
    fs::write(out.join("layout_constants.rs"), constants(&layout)).expect("cargo's directory can be written");
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

/// The numbers that `layout.h` defines, as Rust's constants: each `#define NAME NUMBER`, and the counters with their
/// names. Types are in the skeleton, which has no numbers.
fn constants(layout: &str) -> String {
    let mut rust = String::new();
    let defined = layout.lines().filter_map(|line| line.strip_prefix("#define "));
    for (name, value) in defined.filter_map(|definition| definition.split_once(' ')) {
        let number = value.split("/*").next().unwrap_or_default().trim();
        if number.chars().all(|digit| digit.is_ascii_hexdigit() || digit == 'x') {
            // Bits of members that have one byte.
            let is_byte = ["NUMBERS_", "DELTA_"].iter().any(|start| name.starts_with(start));
            let kind = if is_byte { "u8" } else { "u32" };
            writeln!(rust, "pub const {name}: {kind} = {number};").expect("a string takes all");
        }
    }
    let counters = layout.split("enum counter {").nth(1).and_then(|rest| rest.split('}').next());
    let counters =
        counters.expect("layout.h has the counters").lines().filter_map(|line| line.trim().split_once(" = "));
    let mut names = Vec::new();
    for (name, value) in counters.filter_map(|(name, value)| Some((name.strip_prefix("COUNT_")?, value))) {
        let number = value.split(',').next().unwrap_or_default();
        assert_eq!(number, names.len().to_string(), "COUNT_{name} is out of order in layout.h");
        writeln!(rust, "pub const COUNT_{name}: u32 = {number};").expect("a string takes all");
        names.push(name.to_lowercase());
    }
    writeln!(rust, "/// Names of the counters, by number.").expect("a string takes all");
    writeln!(rust, "pub const COUNTERS: [&str; {}] = {names:?};", names.len()).expect("a string takes all");
    rust
}
