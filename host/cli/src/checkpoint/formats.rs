//! The files that people take for safetensors files, recognised by their first bytes: what such a file is, and what to do.

use std::collections::BTreeSet;
use std::str;

use gradsync_cli::text::{one_line, shown};
use serde::Deserialize;

/// Formats by the bytes with which they begin.
const BEGINNINGS: [(&[u8], &str); 19] = [
    (b"\x93NUMPY", "a NumPy array (.npy): save it by safetensors.numpy.save_file, with a name"),
    (b"GGUF", "a GGUF file of llama.cpp: convert its tensors to safetensors"),
    (b"ggml", "a GGML file of llama.cpp: convert its tensors to safetensors"),
    (b"lmgg", "a GGML file of llama.cpp: convert its tensors to safetensors"),
    (b"tjgg", "a GGML file of llama.cpp: convert its tensors to safetensors"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it: convert its tensors to safetensors"),
    (b"\x1f\x8b", "compressed by gzip: decompress it first, by `gunzip`"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it first, by `unzstd`"),
    (b"\xfd7zXZ\0", "compressed by xz: decompress it first, by `unxz`"),
    (b"BZh", "compressed by bzip2: decompress it first, by `bunzip2`"),
    (b"\x04\x22\x4d\x18", "compressed by lz4: decompress it first, by `unlz4`"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive: unpack it first"),
    (b"PAR1", "a Parquet table, and holds no tensors by name: give the checkpoint"),
    (b"\x80\x02", PICKLE),
    (b"\x80\x03", PICKLE),
    (b"\x80\x04", PICKLE),
    (b"\x80\x05", PICKLE),
    (b"\xff\xfe", "text in UTF-16, perhaps a binary file that a shell has converted: copy the file itself"),
];
const PICKLE: &str = "a Python pickle, as old versions of torch.save write it: load it by torch.load, and save its \
                      tensors by safetensors.torch.save_file";
/// Where the header of a tar archive has its mark.
const TAR_MARK: usize = 257;
/// The number of characters of a text that an error repeats.
const SHOWN: usize = 60;

/// Says what a file with this beginning is, if it is of another known format, and what to do.
pub(super) fn recognised(beginning: &[u8]) -> Option<String> {
    if !beginning.is_empty() && beginning.iter().take(512).all(|&byte| byte == 0) {
        return Some(
            "full of zeros where a header must be: its space was reserved, and nothing written; make it again".into(),
        );
    }
    if begins_as_safetensors(beginning) {
        return None;
    }
    if beginning.starts_with(b"PK\x03\x04") || beginning.starts_with(b"PK\x05\x06") {
        return Some(zip(beginning).into());
    }
    if beginning.get(TAR_MARK..).is_some_and(|rest| rest.starts_with(b"ustar")) {
        return Some("a tar archive: unpack it first, by `tar -xf`".into());
    }
    // The number of the format's version, and then a field of bytes.
    match beginning {
        [0x08, 1, 0x12, ..] => return Some("a SavedModel of TensorFlow: convert its tensors to safetensors".into()),
        [0x08, 2..=31, 0x12, ..] => return Some("an ONNX model: convert its tensors to safetensors".into()),
        _ => {}
    }
    let known = BEGINNINGS.iter().find(|(bytes, _)| beginning.starts_with(bytes));
    known.map(|(_, what)| (*what).to_owned()).or_else(|| text(beginning))
}

/// Whether the bytes are the length of a header and the begin of a JSON object: such a file has a fault, but no other format.
fn begins_as_safetensors(beginning: &[u8]) -> bool {
    let is_short = beginning.get(5..8) == Some(&[0; 3]);
    is_short && beginning.get(8).is_none_or(|&byte| byte == b'{')
}

/// A zip archive, by the names of the files in it.
fn zip(beginning: &[u8]) -> &'static str {
    let contains = |name: &[u8]| beginning.windows(name.len()).any(|bytes| bytes == name);
    if contains(b"data.pkl") {
        "a PyTorch file (.pt, .pth or .bin): load it by torch.load, and save its tensors by safetensors.torch.save_file"
    } else if contains(b".npy") {
        "a NumPy archive (.npz): load it by numpy.load, and save its arrays by safetensors.numpy.save_file"
    } else {
        "a zip archive: unpack it first, and give a safetensors file"
    }
}

/// A text file.
fn text(beginning: &[u8]) -> Option<String> {
    let valid = match str::from_utf8(beginning) {
        Ok(text) => text,
        // The beginning may end within a character.
        Err(error) if error.error_len().is_none() => str::from_utf8(&beginning[..error.valid_up_to()]).ok()?,
        Err(_) => return None,
    };
    let is_text =
        |character: char| !character.is_control() || matches!(character, '\n' | '\r' | '\t' | '\x1b' | '\x0c');
    let text = valid.trim_start_matches('\u{feff}').trim_start();
    if text.len() < 2 || !valid.chars().all(is_text) {
        return None;
    }
    let first: String = text.lines().next().unwrap_or_default().chars().take(SHOWN).collect();
    let first = one_line(&first);
    let small: String = text.chars().take(1024).flat_map(char::to_lowercase).collect();
    Some(if text.starts_with("version https://git-lfs.github.com/spec/") {
        "a Git LFS pointer, which stands for the file: fetch the file itself, by `git lfs pull`".into()
    } else if text.starts_with("/annex/objects/") {
        "a git-annex pointer, which stands for the file: fetch the file itself, by `git annex get`".into()
    } else if small.starts_with('<') && (small.contains("<html") || small.contains("<!doctype html")) {
        "an HTML page, perhaps a server's error or its page for signing in: open it to see, and download the file again"
            .into()
    } else if small.starts_with('<') {
        format!("XML, perhaps a server's error ({first}): open it to see, and download the file again")
    } else if text.starts_with(['{', '[']) {
        json(text).unwrap_or_else(|| format!("JSON text, and holds no tensors ({first}): give the safetensors file"))
    } else {
        format!("text, and holds no tensors ({first}): give the safetensors file, or download it again")
    })
}

/// The index of a checkpoint that is divided into several files.
fn json(text: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::HashMap<String, String>,
    }
    if !text.contains("\"weight_map\"") {
        return None;
    }
    // Only the beginning of a long index was read; then its files stay without names.
    let files = serde_json::from_str(text).map(|index: Index| index.weight_map.into_values().collect::<BTreeSet<_>>());
    let files: Vec<String> = files.iter().flatten().take(2).map(|file| shown(file).to_string()).collect();
    let files = if files.is_empty() { String::new() } else { format!(" ({}, ...)", files.join(", ")) };
    Some(format!(
        "the index of a checkpoint that is divided into several files{files}: reduce each of these by itself, with the \
         file of that name of every rank"
    ))
}
