//! [`Variables`]: the variables of a model by name, in an order that is the same on every rank.

use candle_core::Var;
use candle_nn::VarMap;

/// The variables of a model with their names, sorted by name: a [`VarMap`] has the order of its hash map, which differs between processes.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use gradsync_candle::Variables;
///
/// let variables = VarMap::new();
/// let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
/// let _norm = candle_nn::batch_norm(8, 1e-5, builder.pp("norm"))?;
/// // candle registers the running mean and variance as variables. They are no parameters, and have no gradients.
/// let variables = Variables::from(&variables).with_frozen(|name| name.contains("running_"));
/// assert_eq!(variables.trained().count(), 2);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Variables(Vec<Variable>);

#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) var: Var,
    pub(crate) is_trained: bool,
}

impl Variables {
    /// Declares variables as not trained, by their names: frozen layers, the base of a LoRA, running means. Their gradients are neither
    /// reduced nor kept, and optimizers do not change them. A variable that has no gradient on any rank is also left unchanged without
    /// this.
    pub fn with_frozen(mut self, is_frozen: impl Fn(&str) -> bool) -> Self {
        self.0.iter_mut().for_each(|variable| variable.is_trained &= !is_frozen(&variable.name));
        self
    }

    /// All variables, by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Var)> {
        self.0.iter().map(|variable| (&variable.name[..], &variable.var))
    }

    /// The trained variables, for the optimizer.
    pub fn trained(&self) -> impl Iterator<Item = &Var> {
        self.0.iter().filter(|variable| variable.is_trained).map(|variable| &variable.var)
    }

    pub(crate) fn as_slice(&self) -> &[Variable] {
        &self.0
    }
}

impl From<&VarMap> for Variables {
    fn from(variables: &VarMap) -> Self {
        // A thread that panicked leaves variables unchanged: the map is changed by insertions alone.
        let data = variables.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        data.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    }
}

impl<S: Into<String>> FromIterator<(S, Var)> for Variables {
    fn from_iter<I: IntoIterator<Item = (S, Var)>>(variables: I) -> Self {
        let variable = |(name, var): (S, Var)| Variable { name: name.into(), var, is_trained: true };
        let mut variables: Vec<Variable> = variables.into_iter().map(variable).collect();
        variables.sort_by(|one, other| one.name.cmp(&other.name));
        Self(variables)
    }
}
