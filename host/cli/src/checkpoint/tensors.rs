//! The tensors of a checkpoint, stored in a few bytes each besides their names: files may have millions of them.

use gradsync::DType;
use safetensors::Dtype;

/// The description of a tensor, which is the same in all ranks' files.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// The number of elements.
    pub(crate) len: usize,
}

impl Tensor<'_> {
    /// The size in bytes in a file.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.bitsize() / 8
    }
}

/// The dtypes that can be reduced, as files name them.
const REDUCIBLE: [(Dtype, DType); 4] =
    [(Dtype::F64, DType::F64), (Dtype::F32, DType::F32), (Dtype::F16, DType::F16), (Dtype::BF16, DType::BF16)];

/// The dtype by which the elements can be reduced; `None` for integers and other formats.
pub(crate) fn reducible(dtype: Dtype) -> Option<DType> {
    REDUCIBLE.into_iter().find(|(file, _)| *file == dtype).map(|(_, dtype)| dtype)
}

/// The file's name of a dtype; `None` for integers.
pub(crate) fn file_dtype(dtype: DType) -> Option<Dtype> {
    REDUCIBLE.into_iter().find(|(_, own)| *own == dtype).map(|(file, _)| file)
}

/// A list of tensors, packed.
#[derive(Debug, Default)]
pub(crate) struct Tensors {
    /// The encoded [`Record`]s.
    records: Vec<u8>,
    /// The offset of each tensor's record.
    begins: Vec<usize>,
    dtypes: Vec<Dtype>,
}

/// Name, shape and number of elements.
type Record<'a> = (&'a str, Vec<usize>, usize);

impl Tensors {
    pub(super) fn push(&mut self, tensor: &Tensor<'_>) {
        self.begins.push(self.records.len());
        self.dtypes.push(tensor.dtype);
        let record = (tensor.name, &tensor.shape, tensor.len);
        let records = std::mem::take(&mut self.records);
        self.records = postcard::to_extend(&record, records).expect("memory takes any record");
    }

    pub(crate) fn len(&self) -> usize {
        self.begins.len()
    }

    pub(crate) fn get(&self, index: usize) -> Tensor<'_> {
        let ((name, shape, len), _): (Record<'_>, _) =
            postcard::take_from_bytes(self.record(index)).expect("it was packed here");
        Tensor { name, dtype: self.dtype(index), shape, len }
    }

    pub(crate) fn dtype(&self, index: usize) -> Dtype {
        self.dtypes[index]
    }

    /// The name alone, without decoding the rest.
    pub(crate) fn name(&self, index: usize) -> &str {
        postcard::take_from_bytes(self.record(index)).expect("a record begins with the name").0
    }

    fn record(&self, index: usize) -> &[u8] {
        &self.records[self.begins[index]..]
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        (0..self.len()).map(|index| self.get(index))
    }
}
