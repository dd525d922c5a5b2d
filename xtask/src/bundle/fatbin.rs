//! Reduces the size of a library of CUDA code by removing the code for unwanted GPU architectures.
//!
//! Such a library holds its kernels in two sections, which are sequences of fat binaries. A fat binary has a header, and for each
//! architecture an entry with its own header and the code. The code of unwanted entries is overwritten with zeros. Nothing moves, so that
//! addresses stay valid and the driver still finds the other entries; zeros take almost no space after compression.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use object::{File, Object, ObjectSection};

/// The section of linked code, which is run.
const LINKED: &str = ".nv_fatbin";
/// The section of relocatable code, which programs that link the library statically would link again; a shared library does not need it.
const RELOCATABLE: &str = "__nv_relfatbin";
const MAGIC: u32 = 0xba55_ed50;
/// The header of a fat binary: magic (u32), version and size of the header (u16), size of all entries (u64).
const HEADER: usize = 16;
/// The part of an entry's header that is read: kind and version (u16), size of the header (u32), size of the code (u64), and the
/// architecture.
const ENTRY: usize = 32;
const ARCHITECTURE: usize = 28;

/// Overwrites the code for all other architectures; fails if one of these architectures has no code.
pub(super) fn keep(library: &mut [u8], architectures: &[u32]) -> Result<()> {
    let file = File::parse(&*library).context("no ELF file")?;
    let section = |name: &str| file.section_by_name(name).and_then(|section| section.file_range());
    let [linked, relocatable] = [LINKED, RELOCATABLE].map(|name| section(name).map(range));
    let linked = linked.with_context(|| format!("it has no section {LINKED}"))?;
    let found = blank(&mut library[linked], architectures).with_context(|| format!("in section {LINKED}"))?;
    for architecture in architectures {
        ensure!(found.contains(architecture), "it has no code for sm_{architecture}, but for {}", list(&found));
    }
    if let Some(relocatable) = relocatable {
        blank(&mut library[relocatable], &[]).with_context(|| format!("in section {RELOCATABLE}"))?;
    }
    Ok(())
}

fn range((begin, len): (u64, u64)) -> Range<usize> {
    begin as usize..(begin + len) as usize
}

fn list(architectures: &[u32]) -> String {
    architectures.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", ")
}

/// Overwrites a section's code for other architectures; returns all architectures that it found, in order.
fn blank(section: &mut [u8], wanted: &[u32]) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    let mut offset = 0;
    while offset < section.len() {
        let header =
            section.get(offset..offset + HEADER).with_context(|| format!("it ends at {offset} in a header"))?;
        let magic = u32::from_le_bytes(bytes(header, 0));
        // Fat binaries begin at multiples of 8 bytes.
        if magic == 0 {
            offset += 8;
            continue;
        }
        ensure!(magic == MAGIC, "at {offset} there is {magic:#x} in place of a fat binary");
        let (header_len, len) = (u16::from_le_bytes(bytes(header, 6)), u64::from_le_bytes(bytes(header, 8)));
        let entries = inside(section, offset + usize::from(header_len), len)?;
        offset = entries.end;
        let mut entry = entries.start;
        while entry < entries.end {
            let header = section[..entries.end].get(entry..entry + ENTRY);
            let header = header.with_context(|| format!("an entry ends at {entry} in its header"))?;
            let (header_len, len) = (u32::from_le_bytes(bytes(header, 4)), u64::from_le_bytes(bytes(header, 8)));
            let architecture = u32::from_le_bytes(bytes(header, ARCHITECTURE));
            ensure!(header_len as usize >= ENTRY, "the entry at {entry} has a header of {header_len} bytes");
            let code = inside(&section[..entries.end], entry + header_len as usize, len)?;
            entry = code.end;
            if !wanted.contains(&architecture) {
                section[code].fill(0);
            }
            if let Err(position) = found.binary_search(&architecture) {
                found.insert(position, architecture);
            }
        }
    }
    Ok(found)
}

fn bytes<const N: usize>(from: &[u8], offset: usize) -> [u8; N] {
    from[offset..offset + N].try_into().expect("as many bytes")
}

/// The range of `len` bytes from `begin` on; fails if the section is too short.
fn inside(section: &[u8], begin: usize, len: u64) -> Result<Range<usize>> {
    let end = usize::try_from(len).ok().and_then(|len| begin.checked_add(len)).filter(|&end| end <= section.len());
    let end = end.with_context(|| format!("{len} bytes from {begin} on are more than there are"))?;
    Ok(begin..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fat binary with an entry for each of these architectures; the first entry is PTX text.
    fn fatbin(architectures: &[u32]) -> Vec<u8> {
        let mut entries = Vec::new();
        for (index, &architecture) in architectures.iter().enumerate() {
            let (kind, header_len, code) = (if index == 0 { 1u16 } else { 2 }, 64u32 + 8 * index as u32, [7u8; 40]);
            let mut entry = [kind.to_le_bytes(), 0x0101u16.to_le_bytes()].concat();
            entry.extend(header_len.to_le_bytes());
            entry.extend((code.len() as u64).to_le_bytes());
            entry.resize(ARCHITECTURE, 3);
            entry.extend(architecture.to_le_bytes());
            entry.resize(header_len as usize, 3);
            entry.extend(code);
            entries.extend(entry);
        }
        let mut all = MAGIC.to_le_bytes().to_vec();
        all.extend([1u16, HEADER as u16].iter().flat_map(|number| number.to_le_bytes()));
        all.extend((entries.len() as u64).to_le_bytes());
        all.extend(entries);
        all
    }

    /// An ELF file with only these sections.
    fn elf(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut names = vec![0];
        let mut data = Vec::new();
        let mut headers = vec![[0u64; 8]];
        let mut add = |name: &str, kind: u64, content: &[u8]| {
            let begin = names.len() as u64;
            names.extend(name.bytes().chain([0]));
            headers.push([begin | kind << 32, 0, 0, 64 + data.len() as u64, content.len() as u64, 0, 1, 0]);
            data.extend_from_slice(content);
        };
        for (name, content) in sections {
            add(name, 1, content);
        }
        let shstrtab = [&names[..], b".shstrtab\0"].concat();
        let begin = names.len() as u64;
        headers.push([begin | 3 << 32, 0, 0, 64 + data.len() as u64, shstrtab.len() as u64, 0, 1, 0]);
        data.extend(shstrtab);
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        // A shared object for x86-64, version 1.
        file.extend([3u16, 62].iter().flat_map(|number| number.to_le_bytes()));
        file.extend(1u32.to_le_bytes());
        file.extend([0, 0, 64 + data.len() as u64].iter().flat_map(|number: &u64| number.to_le_bytes()));
        file.extend(0u32.to_le_bytes());
        let counts = [64, 0, 0, 64, headers.len() as u16, headers.len() as u16 - 1];
        file.extend(counts.iter().flat_map(|number: &u16| number.to_le_bytes()));
        file.extend(data);
        file.extend(headers.iter().flatten().flat_map(|number| number.to_le_bytes()));
        file
    }

    /// The number of code bytes that remain.
    fn left(section: &[u8]) -> usize {
        section.iter().filter(|&&byte| byte == 7).count()
    }

    #[test]
    fn keep_drops_the_code_of_other_architectures_alone() {
        let (one, two) = (fatbin(&[120, 90, 80]), fatbin(&[90]));
        let linked = [&one[..], &[0; 8], &two].concat();
        let relocatable = fatbin(&[90, 80]);
        let before = elf(&[(".text", &[7; 20]), (LINKED, &linked), (RELOCATABLE, &relocatable), (".data", &[7; 9])]);
        let mut after = before.clone();
        keep(&mut after, &[90]).unwrap();
        assert_eq!(after.len(), before.len());
        assert!(before.iter().zip(&after).all(|(before, after)| before == after || (*before, *after) == (7, 0)));
        let file = File::parse(&after[..]).unwrap();
        let section = |name: &str| file.section_by_name(name).unwrap().data().unwrap();
        assert_eq!([".text", LINKED, RELOCATABLE, ".data"].map(|name| left(section(name))), [20, 2 * 40, 0, 9]);
        let mut both = before.clone();
        keep(&mut both, &[90, 120]).unwrap();
        let file = File::parse(&both[..]).unwrap();
        assert_eq!(left(file.section_by_name(LINKED).unwrap().data().unwrap()), 3 * 40);
    }

    #[test]
    fn keep_refuses_what_it_does_not_understand() {
        let refusal = |section: &[u8], wanted: &[u32]| {
            let error = keep(&mut elf(&[(LINKED, section)]), wanted).unwrap_err();
            format!("{error:#}")
        };
        assert_eq!(refusal(&fatbin(&[120, 80]), &[90]), "it has no code for sm_90, but for sm_80, sm_120");
        let whole = fatbin(&[90]);
        assert!(refusal(&whole[..whole.len() - 1], &[90]).contains("more than there are"));
        assert!(refusal(&[9; 32], &[90]).contains("0x9090909 in place of a fat binary"));
        assert!(refusal(&whole[..10], &[90]).contains("ends at 0 in a header"));
        let mut short = whole.clone();
        short[HEADER + 4] = 8;
        assert!(refusal(&short, &[90]).contains("a header of 8 bytes"));
        assert!(format!("{:#}", keep(&mut elf(&[]), &[90]).unwrap_err()).contains("no section .nv_fatbin"));
        assert!(keep(&mut b"a text".to_vec(), &[90]).is_err());
    }
}
