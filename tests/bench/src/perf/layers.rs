//! `--layers`: the division of an Adasum's vector into tensors.

use std::str::FromStr;

use clap::ValueEnum;

use super::tensors::Model;

/// The tensors of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layers {
    /// A number of tensors, as equal as possible.
    Equal(usize),
    /// The tensors of a model, scaled in proportion.
    Of(Model),
}

/// The smallest mean length of a tensor at which a model's tensors roughly keep their proportions.
const LEAST_MEAN_LEN: usize = 16;

impl FromStr for Layers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text.parse(), Model::from_str(text, false)) {
            (Ok(count @ 1..), _) => Ok(Layers::Equal(count)),
            (_, Ok(model)) => Ok(Layers::Of(model)),
            _ => Err(format!("`{text}` is neither a number of tensors nor a model: expected resnet50 or bert-large")),
        }
    }
}

impl Layers {
    /// How many tensors there are.
    pub(crate) fn count(self) -> usize {
        match self {
            Layers::Equal(count) => count,
            Layers::Of(model) => model.lens().len(),
        }
    }

    /// The tensors for a vector of `len` elements, which may be too short for a model.
    pub(crate) fn within(self, len: usize) -> Self {
        match self {
            Layers::Of(model) if len >= LEAST_MEAN_LEN * self.count() => Layers::Of(model),
            _ => Layers::Equal(self.count().min(len)),
        }
    }

    /// Elements of each tensor of a vector of `len` elements.
    pub(crate) fn lens(self, len: usize) -> Vec<usize> {
        match self {
            Layers::Equal(count) => {
                (0..count).map(|tensor| len * (tensor + 1) / count - len * tensor / count).collect()
            }
            Layers::Of(model) => {
                let full = model.lens();
                let whole: usize = full.iter().sum();
                let part = |own: usize| (own as f64 * len as f64 / whole as f64) as usize;
                let mut lens: Vec<usize> = full.into_iter().map(|own| part(own).max(1)).collect();
                // The largest tensor compensates for rounding, and for the minimum length of the shortest tensors.
                let others = lens.iter().sum::<usize>() - lens.iter().max().copied().unwrap_or(0);
                if let Some(largest) = lens.iter_mut().max() {
                    *largest = len - others;
                }
                lens
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_have_all_elements_and_none_is_empty() {
        for layers in ["1", "7", "resnet50", "bert-large"].map(|text| text.parse::<Layers>().unwrap()) {
            for len in [1, 100, 6368, 16_384, 1 << 20, 268_435_456] {
                let layers = layers.within(len);
                let lens = layers.lens(len);
                assert_eq!((lens.len(), lens.iter().sum::<usize>()), (layers.count(), len), "{layers:?} of {len}");
                assert!(lens.iter().all(|&len| len > 0), "{layers:?} of {len}");
            }
        }
        assert_eq!(Layers::Of(Model::BertLarge).within(336_226_108).lens(336_226_108), Model::BertLarge.lens());
        for bad in ["0", "-1", "alexnet", ""] {
            assert!(bad.parse::<Layers>().is_err_and(|error| error.contains("bert-large")), "{bad}");
        }
    }
}
