//! Files that people take for safetensors files: the error names the file, what it is, and what to do.

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, save_raw, tensor};

/// Replaces each input in turn by `bytes`, and expects a refusal with these words.
#[track_caller]
fn is_called(bytes: &[u8], words: &[&str]) {
    let tensors = vec![tensor("weight", Format::F32, &[100], &[1.0; 100])];
    for input in 0..2 {
        let ranks = Ranks::new(&[tensors.clone(), tensors.clone()]);
        std::fs::write(&ranks.inputs[input], bytes).unwrap();
        let name = format!("in{input}.safetensors");
        let words = [words, &[&name]].concat();
        ranks.refuses(&format!("{:?}", &bytes[..bytes.len().min(20)]), &["--op", "sum"], &words);
    }
}

/// Some bytes of another format after those by which it is known.
fn followed(beginning: &[u8]) -> Vec<u8> {
    let rest = (0..600_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 | 1);
    beginning.iter().copied().chain(rest).collect()
}

/// A zip archive, as far as the first file in it.
fn zip(name: &str) -> Vec<u8> {
    let mut bytes = b"PK\x03\x04\x00\x00\x08\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    bytes.extend((name.len() as u16).to_le_bytes());
    bytes.extend([0, 0]);
    bytes.extend(name.as_bytes());
    followed(&bytes)
}

#[test]
fn a_pointer_of_git_lfs_or_git_annex_is_to_be_fetched() {
    let lfs = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 1234\n", "4cac1962".repeat(8));
    is_called(lfs.as_bytes(), &["Git LFS pointer", "git lfs pull"]);
    is_called(b"/annex/objects/SHA256E-s1234--4cac1962.safetensors\n", &["git-annex", "git annex get"]);
}

#[test]
fn pages_and_messages_of_servers_are_to_be_downloaded_again() {
    is_called(b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", &["HTML", "download"]);
    is_called(b"\xef\xbb\xbf\n  <HTML lang=en>", &["HTML", "download"]);
    is_called(b"<html>\r\n<head><title>502 Bad Gateway</title></head>", &["HTML", "download"]);
    is_called(b"<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>", &["XML", "AccessDenied", "download"]);
    is_called(b"{\"error\":\"Repository not found\"}", &["JSON", "({\"error\":\"Repository not found\"})"]);
    is_called(b"Entry not found", &["text", "Entry not found", "download"]);
    is_called("läuft nicht: 勾配\n".as_bytes(), &["text", "läuft nicht: 勾配"]);
}

#[test]
fn an_index_names_the_files_that_are_to_be_reduced() {
    let [first, second] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{{"a":"{second}","b":"{first}"}}}}"#);
    is_called(index.as_bytes(), &["index", "model-00001-of-00002.safetensors", "each"]);
    let mut long = String::from("{\"weight_map\": {");
    for tensor in 0..40_000 {
        long += &format!("\"model.layers.{tensor}.weight\": \"model-00001-of-00002.safetensors\",\n");
    }
    long += "\"last\": \"model-00002-of-00002.safetensors\"}}";
    is_called(long.as_bytes(), &["index", "each"]);
}

#[test]
fn files_of_pytorch_and_numpy_are_to_be_saved_as_safetensors() {
    let by_torch = ["PyTorch", "torch.load", "safetensors.torch.save_file"];
    is_called(&zip("archive/data.pkl"), &by_torch);
    is_called(&zip("pytorch_model/data.pkl"), &by_torch);
    for protocol in 2..=5 {
        is_called(&followed(&[0x80, protocol, 0x8a, 0x0a, b'l', 0xfc, 0x9c, b'F', 0xf9]), &["pickle", "torch.load"]);
    }
    is_called(&zip("arr_0.npy"), &["NumPy", "numpy.load", "safetensors.numpy.save_file"]);
    is_called(&followed(b"\x93NUMPY\x01\x00"), &["NumPy", "safetensors.numpy.save_file"]);
}

#[test]
fn other_containers_of_tensors_are_to_be_converted() {
    is_called(&followed(b"GGUF\x03\0\0\0\x23\x01\0\0\0\0\0\0"), &["GGUF", "convert"]);
    is_called(&followed(b"\x89HDF\r\n\x1a\n"), &["HDF5", "convert"]);
    is_called(&followed(b"\x08\x08\x12\x07pytorch"), &["ONNX", "convert"]);
    is_called(&followed(b"\x08\x01\x12\x91\x3c"), &["TensorFlow", "convert"]);
}

#[test]
fn compressed_files_and_archives_are_to_be_unpacked() {
    is_called(&followed(b"\x1f\x8b\x08\x08"), &["gzip", "gunzip"]);
    is_called(&followed(b"\x28\xb5\x2f\xfd"), &["zstd"]);
    is_called(&followed(b"\xfd7zXZ\0"), &["xz"]);
    is_called(&followed(b"BZh9"), &["bzip2"]);
    is_called(&zip("notes.txt"), &["zip archive", "unpack"]);
    let mut tar = b"model.safetensors".to_vec();
    tar.resize(257, 0);
    tar.extend(b"ustar  \0");
    tar.resize(1024, 0);
    is_called(&tar, &["tar", "unpack"]);
}

#[test]
fn empty_files_and_files_of_zeros_were_never_written() {
    is_called(b"", &["empty", "make it again"]);
    is_called(&[0; 400], &["zeros", "make it again"]);
    is_called(&[0; 8], &["zeros", "make it again"]);
}

#[test]
fn folders_and_pipes_are_no_files() {
    let ranks = Ranks::new(&[vec![], vec![]]);
    std::fs::remove_file(&ranks.inputs[1]).unwrap();
    std::fs::create_dir(&ranks.inputs[1]).unwrap();
    ranks.refuses("a folder", &["--op", "sum"], &["in1.safetensors", "folder", "name the safetensors file"]);
    let ranks = Ranks::new(&[vec![]]);
    let pipe = crate::program::fifo(ranks.folder.path());
    std::fs::remove_file(&ranks.inputs[0]).unwrap();
    std::fs::rename(pipe, &ranks.inputs[0]).unwrap();
    let finished = ranks.reduce(&["--op", "sum"]);
    finished.refused("a pipe", &["in0.safetensors", "a pipe, a device or a socket", "write the data to a file"]);
}

/// A file with a fault is not taken for another format, whichever character the length of its header begins with.
#[test]
fn a_safetensors_file_with_a_fault_is_called_one() {
    for len in [b'<', b'{', b'[', b'#', b'B', 0x80, 0x1f, 0x93, 0x08] {
        let header = format!("{{{}", " ".repeat(usize::from(len) - 1));
        let ranks = Ranks::new(&[vec![]]);
        save_raw(&ranks.inputs[0], &header, &[0; 40]);
        ranks.refuses("no end", &["--op", "sum"], &["in0.safetensors", "not a complete safetensors file", "EOF"]);
    }
}
