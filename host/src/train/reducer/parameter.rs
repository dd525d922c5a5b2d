//! [`Parameter`]: the description of a parameter, and the detection of tied parameters by their storage.

use std::collections::HashMap;
use std::ops::Range;

use super::OPERATION;
use crate::call::{Value, setters};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::slice::shape_len;

/// A parameter of the model, described by its gradient.
///
/// ```
/// use gradsync::DType;
/// use gradsync::train::Parameter;
///
/// let weight = Parameter::new("encoder.weight", [1024, 768], DType::BF16);
/// let running_mean = Parameter::new("norm.running_mean", [768], DType::F32).with_trained(false);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Parameter {
    /// The name of the parameter, which must be unique.
    pub name: String,
    /// The shape of its gradient.
    pub shape: Vec<usize>,
    /// The dtype of its gradient.
    pub dtype: DType,
    /// Whether it is trained. A parameter that is not trained (frozen layers, the base of a LoRA, the running mean of a BatchNorm) has no
    /// gradient on any rank. True by default.
    pub is_trained: bool,
    /// The address range of the parameter itself on this rank, if it is known. Parameters with the same range are tied: they are one
    /// parameter with several names. `None`, the default, ties it to nothing.
    pub storage: Option<Range<u64>>,
}

impl Parameter {
    /// Describes a trained parameter by its name, and by the shape and the dtype of its gradient; it is tied to no other.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype, is_trained: true, storage: None }
    }

    setters! { with_trained(is_trained: bool), with_storage(storage: Option<Range<u64>>) }

    /// The number of elements of its gradient.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

fn refuse<T>(reason: String) -> Result<T> {
    Err(Error::InvalidArgument { operation: OPERATION, reason })
}

/// Checks this rank's parameters; returns for each the first parameter that it is tied to, which is itself if there is none.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the parameters: for a name that occurs twice, a shape beyond the address space, storages that overlap
/// and are not equal, and tied parameters that differ in shape, dtype or in whether they are trained.
pub(super) fn check(parameters: &[Parameter]) -> Result<Vec<usize>> {
    let mut places = HashMap::new();
    for (index, parameter) in parameters.iter().enumerate() {
        let len = shape_len(OPERATION, &parameter.shape)?;
        if len.checked_mul(size_of::<f64>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
            let Parameter { name, shape, .. } = parameter;
            return refuse(format!("parameter {index}, {name:?}, of shape {shape:?} exceeds the address space"));
        }
        if !parameter.dtype.is_float() {
            let Parameter { name, dtype, .. } = parameter;
            return refuse(format!(
                "parameter {index}, {name:?}, is of {dtype}: only floating-point parameters have gradients"
            ));
        }
        if let Some(first) = places.insert(&parameter.name, index) {
            return refuse(format!("parameters {first} and {index} are both named {:?}", parameter.name));
        }
    }
    let mut owners: Vec<usize> = (0..parameters.len()).collect();
    let stored = |(index, parameter): (usize, &Parameter)| {
        parameter
            .storage
            .clone()
            .filter(|storage| !storage.is_empty())
            .map(|storage| (storage.start, storage.end, index))
    };
    let mut storages: Vec<(u64, u64, usize)> = parameters.iter().enumerate().filter_map(stored).collect();
    storages.sort_unstable();
    // Without an error all storages that overlap are equal, so comparing neighbours is enough.
    for pair in storages.windows(2) {
        let ((start, end, left), (next_start, next_end, right)) = (pair[0], pair[1]);
        if (start, end) == (next_start, next_end) {
            check_tied(parameters, left, right)?;
            owners[right] = owners[left];
        } else if next_start < end {
            return refuse(format!(
                "the storages of {:?} at {start:#x}..{end:#x} and of {:?} at {next_start:#x}..{next_end:#x} overlap and are not equal",
                parameters[left].name, parameters[right].name,
            ));
        }
    }
    Ok(owners)
}

fn check_tied(parameters: &[Parameter], left: usize, right: usize) -> Result<()> {
    let (left, right) = (&parameters[left], &parameters[right]);
    let described = |parameter: &Parameter| {
        let trained = if parameter.is_trained { "trained" } else { "not trained" };
        format!("{:?} (shape {:?}, {}, {trained})", parameter.name, parameter.shape, parameter.dtype)
    };
    let of = |parameter: &Parameter| (parameter.shape.clone(), parameter.dtype, parameter.is_trained);
    if of(left) == of(right) {
        return Ok(());
    }
    refuse(format!("{} and {} have one storage, and must be equal otherwise too", described(left), described(right)))
}

/// The lines by which ranks compare their parameters.
pub(super) fn lines<'a>(parameters: &'a [Parameter], owners: &[usize]) -> Vec<(String, Value<'a>)> {
    let mut lines = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        let Parameter { name, shape, dtype, is_trained, .. } = parameter;
        lines.push((format!("parameter {index}"), Value::Name(name)));
        lines.push((format!("the shape of parameter {index} {name:?}"), Value::Shape(shape)));
        lines.push((format!("the dtype of parameter {index} {name:?}"), Value::DType(*dtype)));
        let trained = if *is_trained { "a trained parameter" } else { "a parameter that is not trained" };
        lines.push((format!("the kind of parameter {index} {name:?}"), Value::Words(trained)));
        let owner = owners.get(index).copied().filter(|&owner| owner != index);
        let tied = owner.map_or(Value::Words("none"), |owner| Value::Name(&parameters[owner].name));
        lines.push((format!("the parameter that parameter {index} {name:?} is tied to"), tied));
    }
    lines.push((format!("parameter {}", parameters.len()), Value::Words("none")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(name: &str, storage: Range<u64>) -> Parameter {
        Parameter::new(name, [4], DType::F32).with_storage(Some(storage))
    }

    #[test]
    fn check_joins_equal_storages_and_refuses_overlapping_ones() {
        let free = Parameter::new("free", [1], DType::F32);
        let parameters =
            [at("a", 64..80), free.clone(), at("b", 0..16), at("c", 64..80), at("d", 80..96), at("e", 64..80)];
        assert_eq!(check(&parameters).unwrap(), [0, 1, 2, 0, 4, 0]);
        // An empty storage overlaps nothing.
        assert_eq!(check(&[at("a", 0..16), at("b", 8..8), at("c", 8..8)]).unwrap(), [0, 1, 2]);

        let refused = |parameters: &[Parameter]| check(parameters).unwrap_err().to_string();
        let text = refused(&[at("b", 8..24), at("a", 0..16)]);
        assert!(text.contains(r#""a" at 0x0..0x10"#) && text.contains(r#""b" at 0x8..0x18"#), "{text}");
        assert!(refused(&[at("a", 0..16), at("b", 0..8)]).contains("overlap"));
        let transposed = Parameter { shape: vec![2, 2], ..at("b", 0..16) };
        let text = refused(&[at("a", 0..16), transposed]);
        assert!(text.contains("[4]") && text.contains("[2, 2]"), "{text}");
        assert!(refused(&[free.clone(), free]).contains(r#"parameters 0 and 1 are both named "free""#));
        let huge = Parameter::new("huge", [usize::MAX, 2], DType::F32);
        assert!(refused(&[huge]).contains("more elements than memory has addresses"));
        let counter = Parameter::new("counter", [1], DType::I64);
        assert!(refused(&[counter]).contains(r#"parameter 0, "counter", is of i64"#));
    }
}
