//! Compiles the .proto files: messages, services and the proto3 JSON form.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 3] = ["localv1/localv1.proto", "globalv1/globalv1.proto", "localnetv1/localnetv1.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let encoded = descriptors.encode_to_vec();
    tonic_prost_build::configure()
        .btree_map(".")
        // A brain encodes an object once for all who follow it.
        .bytes(".localv1.Value.bytes")
        .codec_path("crate::codec::SmallBuffers")
        // The client library has its own connection code.
        .build_transport(false)
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        .compile_fds(descriptors)?;
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("descriptors.bin"), &encoded)?;
    pbjson_build::Builder::new().register_descriptors(&encoded)?.btree_map(["."]).build(&[
        ".localv1",
        ".globalv1",
        ".localnetv1",
    ])?;
    Ok(())
}
