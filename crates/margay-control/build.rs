//! Compiles the protobuf files with a compiler written in Rust: nobody needs `protoc` to build.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/margay.proto", "proto/registration.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // The command line prints the very messages with `--json`.
        .type_attribute(".margay.v1", "#[derive(serde::Serialize)]")
        .compile_fds(descriptors)?;
    Ok(())
}
