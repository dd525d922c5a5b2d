//! The tensors that the header of one file lists, checked by themselves: first their names, then where their bytes lie.

use std::collections::HashSet;

use serde_json::value::RawValue;

use super::header::{self, HeaderError, LEN_BYTES, TensorEntry};
use super::input::Input;
use super::tensors::{Tensor, Tensors, reducible};
use super::{FileError, HeaderLimits, OtherDTypes};

/// The tensors of one file, in the header's order.
pub(super) struct Listing {
    pub(super) tensors: Tensors,
    /// The offset of each tensor in the data.
    pub(super) begins: Vec<usize>,
    pub(super) metadata: Option<Box<RawValue>>,
    /// The offset of the data in the file.
    pub(super) data: u64,
    /// The first entry whose offsets do not fit its shape.
    fault: Option<String>,
}

impl Listing {
    /// Reads a header, in which each name must stand once, and dtypes that cannot be reduced only if `other` takes them.
    pub(super) fn read(input: &Input, limits: &HeaderLimits, other: OtherDTypes) -> Result<Self, FileError> {
        let header = header::of(input, limits)?;
        let data = LEN_BYTES + header.len() as u64;
        let (tensors, begins) = Default::default();
        let mut listing = Listing { tensors, begins, metadata: None, data, fault: None };
        let metadata = header::read(&header, limits, |entry| listing.push(input, &entry, other));
        let metadata = metadata.map_err(|error| match error {
            HeaderError::Malformed(reason) => input.malformed(reason),
            HeaderError::Refused(error) => error,
        })?;
        listing.metadata = metadata.map(RawValue::to_owned);
        drop(header);
        let mut names = HashSet::with_capacity(listing.tensors.len());
        let mut all = (0..listing.tensors.len()).map(|index| listing.tensors.name(index));
        if let Some(name) = all.find(|name| !names.insert(*name)) {
            return Err(input.malformed(format!("tensor {name:?} is there twice")));
        }
        drop(names);
        Ok(listing)
    }

    fn push(&mut self, input: &Input, entry: &TensorEntry<'_>, other: OtherDTypes) -> Result<(), FileError> {
        let &TensorEntry { name, dtype, shape, begin, end } = entry;
        if other == OtherDTypes::Refuse && reducible(dtype).is_none() {
            let path = input.path().to_owned();
            return Err(FileError::OtherDType { path, tensor: name.to_owned(), dtype });
        }
        let len = shape.iter().try_fold(1, |len: usize, &dimension| len.checked_mul(dimension));
        let bits = len.and_then(|len| len.checked_mul(dtype.bitsize())).filter(|bits| bits % 8 == 0);
        let fits = bits.is_some_and(|bits| begin.checked_add(bits / 8) == Some(end));
        if !fits && self.fault.is_none() {
            let fault = format!("tensor {name:?} is {dtype} {shape:?}, which does not take the bytes {begin} to {end}");
            self.fault = Some(fault);
        }
        // Behind a fault only names, dtypes and shapes are of interest.
        self.tensors.push(&Tensor { name, dtype, shape: shape.to_owned(), len: len.filter(|_| fits).unwrap_or(0) });
        self.begins.push(begin);
        Ok(())
    }

    /// The tensors in the order of their bytes; of tensors with the same offset, empty ones come first.
    pub(super) fn by_place(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.begins.len() as u32).collect();
        let key = |index: &u32| (self.begins[*index as usize], self.tensors.get(*index as usize).len > 0);
        if !order.is_sorted_by_key(key) {
            order.sort_by_cached_key(key);
        }
        order
    }

    /// Refuses offsets that do not fit shapes, and tensors that leave gaps, overlap, or end elsewhere than the file.
    pub(super) fn check_places(&self, input: &Input) -> Result<(), FileError> {
        if let Some(fault) = &self.fault {
            return Err(input.malformed(fault.clone()));
        }
        let in_file = input.len() - self.data;
        let (mut end, mut last) = (0, None);
        for index in self.by_place() {
            let (tensor, begin) = (self.tensors.get(index as usize), self.begins[index as usize]);
            let name = tensor.name;
            if begin != end {
                let after = last.map(|last| format!(", where tensor {last:?} ends")).unwrap_or_default();
                let reason = format!("tensor {name:?} begins at byte {begin} of the data, and not at {end}{after}");
                return Err(input.malformed(reason));
            }
            end += tensor.bytes();
            if end as u64 > in_file {
                let reason = format!(
                    "tensor {name:?} ends at byte {end} of the data, and the file has {in_file}: it was cut short"
                );
                return Err(input.malformed(reason));
            }
            last = Some(name);
        }
        if (end as u64) < in_file {
            let last = last.map_or("the header".to_owned(), |last| format!("tensor {last:?}, its last"));
            return Err(input.malformed(format!("{} bytes follow {last}", in_file - end as u64)));
        }
        Ok(())
    }
}
