//! safetensors files: written with the `safetensors` crate where it can write them, and by hand where a test needs a
//! layout or a defect that the crate does not produce.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use tempfile::TempDir;

/// Name, shape and data of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Array,
}

/// A tensor with these values.
pub(crate) fn tensor(name: &str, format: Format, shape: &[usize], values: &[f64]) -> Tensor {
    assert_eq!(values.len(), shape.iter().product::<usize>(), "the test's own shape is wrong");
    Tensor { name: name.to_owned(), shape: shape.to_vec(), data: Array::new(format, values) }
}

/// The safetensors dtype of a format.
pub(crate) fn file_dtype(format: Format) -> Dtype {
    match format {
        Format::F64 => Dtype::F64,
        Format::F32 => Dtype::F32,
        Format::F16 => Dtype::F16,
        Format::BF16 => Dtype::BF16,
    }
}

/// Writes a file through the crate.
pub(crate) fn save(path: &Path, tensors: &[Tensor]) {
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.data.to_bytes()).collect();
    let views = tensors.iter().zip(&bytes).map(|(tensor, bytes)| {
        let dtype = file_dtype(tensor.data.format());
        (tensor.name.clone(), TensorView::new(dtype, tensor.shape.clone(), bytes).expect("a view that fits"))
    });
    serialize_to_file(views, None, path).expect("the input can be written");
}

/// Writes a file by hand: this header without padding, and then these bytes.
pub(crate) fn save_raw(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    std::fs::write(path, bytes).expect("the input can be written");
}

/// One entry of a header.
pub(crate) fn entry(name: &str, dtype: &str, shape: &[usize], start: usize, end: usize) -> String {
    format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}")
}

/// Reads a result back through the crate, by name.
pub(crate) fn load(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("no output at {}: {error}", path.display()));
    let file = SafeTensors::deserialize(&bytes).expect("the output is a safetensors file");
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            let format = match view.dtype() {
                Dtype::F64 => Format::F64,
                Dtype::F32 => Format::F32,
                Dtype::F16 => Format::F16,
                Dtype::BF16 => Format::BF16,
                other => panic!("{name} is {other:?} in the output"),
            };
            let data = Array::from_bytes(format, view.data());
            (name.clone(), Tensor { name, shape: view.shape().to_vec(), data })
        })
        .collect()
}

/// A folder with the inputs of P ranks, and the path of the output.
pub(crate) struct Ranks {
    pub(crate) folder: TempDir,
    pub(crate) inputs: Vec<PathBuf>,
}

impl Ranks {
    /// Writes the inputs `in0.safetensors` and so on through the crate.
    pub(crate) fn new(ranks: &[Vec<Tensor>]) -> Ranks {
        let folder = TempDir::new().expect("a temporary folder");
        let inputs: Vec<PathBuf> =
            (0..ranks.len()).map(|rank| folder.path().join(format!("in{rank}.safetensors"))).collect();
        for (path, tensors) in inputs.iter().zip(ranks) {
            save(path, tensors);
        }
        Ranks { folder, inputs }
    }

    pub(crate) fn output(&self) -> PathBuf {
        self.folder.path().join("out.safetensors")
    }

    /// The names and bytes of everything in the folder, to detect any change.
    pub(crate) fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.folder.path()).expect("the folder can be listed");
        entries
            .map(|entry| {
                let entry = entry.expect("an entry");
                let bytes =
                    if entry.path().is_file() { std::fs::read(entry.path()).expect("readable") } else { Vec::new() };
                (entry.file_name().to_string_lossy().into_owned(), bytes)
            })
            .collect()
    }

    /// Runs `gradsync reduce <options> --output out <inputs>`.
    pub(crate) fn reduce(&self, options: &[&str]) -> crate::program::Finished {
        let output = self.output();
        let options = options.iter().copied().chain(["--output"]).map(OsStr::new);
        let paths = std::iter::once(&output).chain(&self.inputs).map(|path| path.as_os_str());
        crate::program::reduce(self.folder.path(), options.chain(paths))
    }

    /// Runs the command twice, without an output file and with an older one. Both runs have to be refused with these words, and neither may
    /// change anything in the folder.
    #[track_caller]
    pub(crate) fn refuses(&self, what: &str, options: &[&str], words: &[&str]) {
        let before = self.contents();
        self.reduce(options).refused(what, words);
        assert!(self.contents() == before, "{what}: the folder now holds {:?}", self.contents().keys());
        std::fs::write(self.output(), b"an older result").expect("the folder is writable");
        let before = self.contents();
        self.reduce(options).refused(what, words);
        assert!(self.contents() == before, "{what}: an older output was not left as it was");
    }
}
