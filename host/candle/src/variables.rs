//! [`Variables`]: the variables of a model by name, in an order that is the same on every rank.

use std::fmt;
use std::sync::{PoisonError, TryLockError};

use candle_core::{TensorId, Var};
use candle_nn::VarMap;

/// The variables of a model with their names, sorted by name: a [`VarMap`] has the order of its hash map, which differs between processes.
/// [`extend`](Extend::extend) adds variables of another map, or of none.
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
pub struct Variables {
    /// By name, the local ones last.
    all: Vec<Variable>,
    /// The map that they are from.
    map: Option<Map>,
}

#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) var: Var,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Trained,
    Frozen,
    Local,
}

#[derive(Clone)]
struct Map(VarMap);

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VarMap")
    }
}

impl Variable {
    /// Whether it is trained by all ranks together.
    pub(crate) fn is_trained(&self) -> bool {
        self.role == Role::Trained
    }
}

impl Variables {
    /// Declares variables as not trained, by their names: frozen layers, the base of a LoRA, running means. Their gradients are neither
    /// reduced nor kept, and optimizers do not change them. A variable that has no gradient on any rank is also left unchanged without
    /// this. Running means differ between ranks: [`average_buffers`](crate::DataParallel::average_buffers) makes them equal.
    #[must_use]
    pub fn with_frozen(self, is_frozen: impl Fn(&str) -> bool) -> Self {
        self.with_role(Role::Frozen, is_frozen)
    }

    /// Declares variables that each rank keeps to itself, by their names. They are neither made equal nor compared, their gradients are not
    /// reduced and not [clipped](crate::DataParallel::clip_gradients), and the ranks may have different ones, of any dtype.
    #[must_use]
    pub fn with_local(self, is_local: impl Fn(&str) -> bool) -> Self {
        self.with_role(Role::Local, is_local)
    }

    fn with_role(mut self, role: Role, has_role: impl Fn(&str) -> bool) -> Self {
        self.all.iter_mut().filter(|variable| has_role(&variable.name)).for_each(|variable| variable.role = role);
        self.sort();
        self
    }

    fn sort(&mut self) {
        self.all.sort_by(|one, other| {
            let key = |variable: &Variable| variable.role == Role::Local;
            key(one).cmp(&key(other)).then_with(|| one.name.cmp(&other.name))
        });
    }

    /// All variables, by name, the [local](Self::with_local) ones last.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Var)> {
        self.all.iter().map(|variable| (&variable.name[..], &variable.var))
    }

    /// The trained variables, for the optimizer; the [local](Self::with_local) ones too.
    pub fn trained(&self) -> impl Iterator<Item = &Var> {
        self.all.iter().filter(|variable| variable.role != Role::Frozen).map(|variable| &variable.var)
    }

    /// The variables that all ranks have, trained and frozen ones.
    pub(crate) fn reduced(&self) -> &[Variable] {
        &self.all[..self.all.partition_point(|variable| variable.role != Role::Local)]
    }

    /// The local variables.
    pub(crate) fn local(&self) -> &[Variable] {
        &self.all[self.reduced().len()..]
    }

    /// The name of a variable that was added to the map later, unless this thread or another one holds the map's lock.
    pub(crate) fn later_name(&self, id: TensorId) -> Option<String> {
        let Map(map) = self.map.as_ref()?;
        let data = match map.data().try_lock() {
            Ok(data) => data,
            Err(TryLockError::Poisoned(data)) => data.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        data.iter().find(|(_, var)| var.id() == id).map(|(name, _)| name.clone())
    }
}

impl From<&Variables> for Variables {
    fn from(variables: &Variables) -> Self {
        variables.clone()
    }
}

impl From<&VarMap> for Variables {
    fn from(map: &VarMap) -> Self {
        // A thread that panicked leaves variables unchanged: the map is changed by insertions alone.
        let data = map.data().lock().unwrap_or_else(PoisonError::into_inner);
        let variables: Self = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        Self { map: Some(Map(map.clone())), ..variables }
    }
}

impl<S: Into<String>> FromIterator<(S, Var)> for Variables {
    fn from_iter<I: IntoIterator<Item = (S, Var)>>(variables: I) -> Self {
        let mut all = Self::default();
        all.extend(variables);
        all
    }
}

impl<S: Into<String>> Extend<(S, Var)> for Variables {
    fn extend<I: IntoIterator<Item = (S, Var)>>(&mut self, variables: I) {
        let variable = |(name, var): (S, Var)| Variable { name: name.into(), var, role: Role::Trained };
        self.all.extend(variables.into_iter().map(variable));
        self.sort();
    }
}
