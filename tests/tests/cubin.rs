//! The assembled kernels in the crate, read as ELF files. Each file holds the entry points of its family and no others, for the
//! architecture of its folder, with the numbers of parameter bytes and threads of the host's table. `cargo xtask ptxas` proves that they
//! are the assembler's output for the PTX.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use gradsync_device::abi::{self, EntryPoint};
use object::{FileFlags, Object, ObjectSection};

/// Attributes of an entry point, as `cuobjdump -elf` names them: the threads of a block in three dimensions; the symbol, offset and size of
/// the parameters.
const EIATTR_MAX_THREADS: u8 = 0x05;
const EIATTR_PARAM_CBANK: u8 = 0x0a;
/// The form of an attribute that is followed by its length and value; attributes of other forms have four bytes.
const EIFMT_SVAL: u8 = 0x04;

/// The architecture, family and content of every file.
fn files() -> Vec<(u32, String, Vec<u8>)> {
    let mut found = Vec::new();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../host/cubin");
    for arch in std::fs::read_dir(folder).expect("the folder of cubins is there") {
        let arch = arch.expect("a readable folder").path();
        let sm = arch.file_name().and_then(|name| name.to_str()?.strip_prefix("sm_")?.parse().ok()).expect("sm_NN");
        for file in std::fs::read_dir(&arch).expect("a folder for an architecture") {
            let path = file.expect("a readable folder").path();
            let family = path.file_stem().expect("a named file").to_string_lossy().into_owned();
            found.push((sm, family, std::fs::read(&path).expect("a readable file")));
        }
    }
    assert!(!found.is_empty());
    found
}

/// The attributes with a value in `.nv.info.NAME`.
fn attributes(info: &[u8]) -> BTreeMap<u8, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut rest = info;
    while let [form, attribute, low, high, after @ ..] = rest {
        let length = if *form == EIFMT_SVAL { usize::from(u16::from_le_bytes([*low, *high])) } else { 0 };
        let (value, next) = after.split_at(length);
        found.insert(*attribute, value.to_vec());
        rest = next;
    }
    assert!(rest.is_empty(), "an attribute without its length");
    found
}

#[test]
fn cubins_have_every_family_for_every_architecture() {
    let mut found: Vec<_> = files().into_iter().map(|(sm, family, _)| (sm, family)).collect();
    found.sort();
    let families = ["one_shot", "packet_adasum", "peer_adasum", "two_shot"];
    let expected = [80, 90, 100].map(|sm| families.map(|family| (sm, family.to_owned())));
    assert_eq!(found, expected.concat());
}

#[test]
fn cubins_are_of_their_folders_architecture() {
    for (sm, family, bytes) in files() {
        let file = object::File::parse(&*bytes).unwrap_or_else(|error| panic!("sm_{sm} {family}: {error}"));
        let FileFlags::Elf { abi_version, e_flags, .. } = file.flags() else {
            panic!("sm_{sm} {family} is no ELF file")
        };
        // Every driver of CUDA 12 knows the first form; the second was added for architecture 10.0.
        let (form, found) = if sm < 100 { (7, e_flags.0 & 0xff) } else { (8, (e_flags.0 >> 8) & 0xff) };
        assert_eq!((abi_version, found), (form, sm), "sm_{sm} {family}");
    }
}

#[test]
fn cubins_have_the_entry_points_of_the_table() {
    for (sm, family, bytes) in files() {
        let file = object::File::parse(&*bytes).unwrap_or_else(|error| panic!("sm_{sm} {family}: {error}"));
        let section = |prefix: &'static str| {
            let sections = file.sections().filter_map(move |section| {
                Some((
                    section.name().ok()?.strip_prefix(prefix)?.to_owned(),
                    section.data().expect("its data").to_vec(),
                ))
            });
            sections.collect::<BTreeMap<_, _>>()
        };
        let (code, info) = (section(".text."), section(".nv.info."));
        let expected: BTreeMap<&str, &EntryPoint> =
            abi::entries().filter(|entry| entry.family == family).map(|entry| (entry.name, entry)).collect();
        assert!(!expected.is_empty(), "sm_{sm}: there is no family {family}");
        assert!(code.keys().eq(expected.keys()), "sm_{sm} {family} has code of {:?}", code.keys());
        for (name, entry) in expected {
            let attributes = attributes(&info[name]);
            let threads: Vec<u8> = [entry.bounds.threads, 1, 1].iter().flat_map(|side| side.to_le_bytes()).collect();
            assert_eq!(attributes[&EIATTR_MAX_THREADS], threads, "sm_{sm} {name}");
            let parameters = &attributes[&EIATTR_PARAM_CBANK];
            let length = u16::from_le_bytes([parameters[6], parameters[7]]);
            assert_eq!(usize::from(length), 8 * entry.params.len(), "sm_{sm} {name}: every parameter has 8 bytes");
        }
    }
}
