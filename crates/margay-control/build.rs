//! Compiles the protobuf files with a compiler written in Rust: nobody needs `protoc` to build.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    // It speaks of the hops of a trace in the words of the API, which are generated below.
    tonic_prost_build::configure()
        .extern_path(".margay.v1", "crate::api::v1")
        .compile_fds(protox::compile(["proto/registration.proto"], ["proto"])?)?;
    tonic_prost_build::configure().compile_fds(protox::compile(["proto/handover.proto"], ["proto"])?)?;
    tonic_prost_build::configure()
        // The command line prints the very messages with `--json`.
        .type_attribute(".margay.v1", "#[derive(serde::Serialize)]")
        .compile_fds(protox::compile(["proto/margay.proto"], ["proto"])?)?;
    Ok(())
}
