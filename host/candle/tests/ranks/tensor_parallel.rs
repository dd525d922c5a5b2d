//! Layers that are divided among ranks equal the whole layers, forward and backward, bit for bit: all numbers are integers.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Linear, VarBuilder, VarMap};
use gradsync_candle::Error;
use gradsync_candle::tensor_parallel::{ColumnParallelLinear, RowParallelLinear, TensorParallel};

use crate::Owned;
use crate::data_parallel::{integers, values};

/// A case that all ranks of a group run, with tensors on this device.
pub(crate) type Case = (&'static str, fn(&TensorParallel, &Device));

pub(crate) const ALL: &[Case] = &[
    ("two divided layers as whole ones", block),
    ("divided layers with whole inputs and outputs", whole_in_whole_out),
    ("operations and their adjoints", adjoints),
    ("layers with new variables", built),
    ("layers and tensors that are refused", refused),
];

/// Runs all cases on the host.
pub(crate) fn on_host(comm: Owned) {
    let group = TensorParallel::from_boxed(comm);
    ALL.iter().for_each(|(_, run)| run(&group, &Device::Cpu));
}

const INPUTS: usize = 8;
const HIDDEN: usize = 12;
const OUTPUTS: usize = 4;

struct Whole {
    input: Var,
    up: [Var; 2],
    down: [Var; 2],
}

impl Whole {
    fn new(dtype: DType, device: &Device) -> Self {
        let var = |shape: &[usize], seed| Var::from_tensor(&integers(shape, dtype, seed, device)).unwrap();
        Self {
            input: var(&[2, 3, INPUTS], 1),
            up: [var(&[HIDDEN, INPUTS], 2), var(&[HIDDEN], 3)],
            down: [var(&[OUTPUTS, HIDDEN], 4), var(&[OUTPUTS], 5)],
        }
    }

    fn layers(&self) -> [Linear; 2] {
        [&self.up, &self.down]
            .map(|[weight, bias]| Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone())))
    }

    fn vars(&self) -> [&Var; 5] {
        [&self.input, &self.up[0], &self.up[1], &self.down[0], &self.down[1]]
    }
}

fn loss(output: &Tensor) -> Tensor {
    let weights = integers(output.dims(), output.dtype(), 9, output.device());
    (output.sqr().unwrap() * weights).unwrap().sum_all().unwrap()
}

/// Taking a part is differentiable, so each rank has the gradients of its parts at their offsets in the whole, and zeros elsewhere.
/// Gradients of undivided parameters are whole on all ranks.
fn compare(group: &TensorParallel, device: &Device, forward: impl Fn(&Whole) -> Tensor) {
    [DType::F64, DType::F32].into_iter().for_each(|dtype| compare_in(dtype, group, device, &forward));
}

fn compare_in(dtype: DType, group: &TensorParallel, device: &Device, forward: &dyn Fn(&Whole) -> Tensor) {
    let (divided, whole) = (Whole::new(dtype, device), Whole::new(dtype, device));
    let [up, down] = whole.layers();
    let expected = down.forward(&up.forward(&whole.input).unwrap().relu().unwrap()).unwrap();
    let found = forward(&divided);
    assert_eq!(values(&found), values(&expected));
    let (found, expected) = (loss(&found).backward().unwrap(), loss(&expected).backward().unwrap());
    for (index, (own, whole)) in divided.vars().into_iter().zip(whole.vars()).enumerate() {
        let (found, expected) = (found.get(own).unwrap(), expected.get(whole).unwrap());
        assert!(values(expected).iter().any(|value| *value != 0.0));
        let dim = match index {
            1 | 2 => 0,
            3 => 1,
            _ => {
                assert_eq!(values(found), values(expected), "variable {index}");
                continue;
            }
        };
        let part = own.dim(dim).unwrap() / group.world_size();
        let cut = |tensor: &Tensor| values(&tensor.narrow(dim, group.rank() * part, part).unwrap());
        assert_eq!(cut(found), cut(expected), "variable {index}");
        let sum = |values: Vec<f64>| values.iter().map(|value| value.abs()).sum::<f64>();
        assert_eq!(sum(values(found)), sum(cut(found)), "variable {index} outside the part");
    }
}

/// Two layers with one all-reduce in each direction.
fn block(group: &TensorParallel, device: &Device) {
    compare(group, device, |whole| {
        let [up, down] = whole.layers();
        let (up, down) = (ColumnParallelLinear::of(&up, group).unwrap(), RowParallelLinear::of(&down, group).unwrap());
        down.forward(&up.forward(&whole.input).unwrap().relu().unwrap()).unwrap()
    });
}

/// Each layer alone, with whole inputs and outputs on every rank.
fn whole_in_whole_out(group: &TensorParallel, device: &Device) {
    compare(group, device, |whole| {
        let [up, down] = whole.layers();
        let up = ColumnParallelLinear::of(&up, group).unwrap().with_gathers(true);
        let down = RowParallelLinear::of(&down, group).unwrap().with_divides(true);
        let hidden = up.forward(&whole.input).unwrap();
        assert_eq!(hidden.dims(), [2, 3, HIDDEN]);
        down.forward(&hidden.relu().unwrap()).unwrap()
    });
}

/// Checks `⟨A x, y⟩ = ⟨x, Aᵀ y⟩` over all ranks, and the forward result of each operation.
fn adjoints(group: &TensorParallel, device: &Device) {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        adjoints_in(dtype, group, device);
    }
}

fn adjoints_in(dtype: DType, group: &TensorParallel, device: &Device) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let own = |seed: usize, shape: &[usize]| integers(shape, dtype, seed, device);
    let all = |shape: &[usize]| (0..world_size).map(|rank| own(rank + 1, shape)).collect::<Vec<_>>();
    let sum =
        |tensors: &[Tensor]| tensors.iter().skip(1).fold(tensors[0].clone(), |sum, tensor| (sum + tensor).unwrap());
    for dim in [0, 1, 2] {
        let small = [2, 3, 2];
        let mut large = small;
        large[dim] *= world_size;
        let part = |tensor: &Tensor| tensor.narrow(dim, rank * small[dim], small[dim]).unwrap();
        let same = |shape: &[usize]| own(7, shape);
        let joined = |seed: usize| {
            Tensor::cat(&(0..world_size).map(|rank| own(rank + seed, &small)).collect::<Vec<_>>(), dim).unwrap()
        };
        // The gradient of Σ y·w is w.
        let run = |input: &Tensor, operation: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>, weights: &Tensor| {
            let input = Var::from_tensor(input).unwrap();
            let output = operation(&input).unwrap();
            let gradients = (&output * weights).unwrap().sum_all().unwrap().backward().unwrap();
            (values(&output), values(gradients.get(&input).unwrap()))
        };
        let check = |name: &str, found: (Vec<f64>, Vec<f64>), output: &Tensor, gradient: &Tensor| {
            assert_eq!(found, (values(output), values(gradient)), "{name} of {dtype:?} along {dim}");
        };
        let found = run(&own(rank + 1, &small), &|x| group.all_reduce(x), &same(&small));
        check("all_reduce", found, &sum(&all(&small)), &same(&small));
        let found = run(&same(&small), &|x| group.all_reduce_gradient(x), &own(rank + 1, &small));
        check("all_reduce_gradient", found, &same(&small), &sum(&all(&small)));
        let found = run(&own(rank + 1, &small), &|x| group.gather(x, dim), &same(&large));
        check("gather", found, &joined(1), &part(&same(&large)));
        let found = run(&same(&large), &|x| group.scatter(x, dim), &own(rank + 1, &small));
        check("scatter", found, &part(&same(&large)), &joined(1));
        let found = run(&own(rank + 1, &small), &|x| group.all_gather(x, dim), &own(rank + 1, &large));
        check("all_gather", found, &joined(1), &part(&sum(&all(&large))));
        let found = run(&own(rank + 1, &large), &|x| group.reduce_scatter(x, dim), &own(rank + 1, &small));
        check("reduce_scatter", found, &part(&sum(&all(&large))), &joined(1));
    }
}

fn built(group: &TensorParallel, device: &Device) {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, device);
    let up = ColumnParallelLinear::build(INPUTS, HIDDEN, group, builder.pp("up")).unwrap();
    let down = RowParallelLinear::build(HIDDEN, OUTPUTS, group, builder.pp("down")).unwrap();
    let input = integers(&[5, INPUTS], DType::F32, 1, device);
    let output = down.forward(&up.forward(&input).unwrap()).unwrap();
    assert_eq!(output.dims(), [5, OUTPUTS]);
    let shape = |name: &str| variables.data().lock().unwrap()[name].dims().to_vec();
    assert_eq!(shape("up.weight"), [HIDDEN / group.world_size(), INPUTS]);
    assert_eq!(shape("down.weight"), [OUTPUTS, HIDDEN / group.world_size()]);
}

fn refused(group: &TensorParallel, device: &Device) {
    let (rank, world_size) = (group.rank(), group.world_size());
    if world_size == 1 {
        return;
    }
    let layer = |outputs: usize| Linear::new(integers(&[outputs, 3], DType::F32, 1, device), None);
    let error = ColumnParallelLinear::of(&layer(world_size + 1), group).unwrap_err();
    assert!(
        matches!(error, Error::Layer(_))
            && error.to_string().contains(&format!("rank {rank}: {} outputs", world_size + 1))
    );
    let error = RowParallelLinear::of(&Linear::new(integers(&[2, world_size + 1], DType::F32, 1, device), None), group)
        .unwrap_err();
    assert!(error.to_string().contains("inputs"), "{error}");
    let bias = integers(&[3], DType::F32, 1, device);
    let text =
        RowParallelLinear::new(integers(&[2, 2], DType::F32, 1, device), Some(bias), group).unwrap_err().to_string();
    assert!(text.contains("[3]"), "{text}");
    if device.is_cpu() {
        // Ranks whose shapes differ all return an error, and the group stays usable. On a GPU the call returns before it is compared with
        // the other ranks' calls, and the error ends the group.
        let odd = integers(&[if rank + 1 == world_size { 3 } else { 2 }], DType::F32, 1, device);
        let text = group.all_reduce(&odd).unwrap_err().to_string();
        let last = format!("rank {}", world_size - 1);
        assert!(text.contains("rank 0") && text.contains(&last) && text.contains("[3]"), "{text}");
    }
    assert!(
        group
            .scatter(&integers(&[world_size + 1], DType::F32, 1, device), 0)
            .unwrap_err()
            .to_string()
            .contains("cannot be divided evenly")
    );
    assert!(group.all_reduce(&Tensor::zeros(2, DType::U32, device).unwrap()).is_err());
    assert_eq!(
        values(&group.all_reduce(&Tensor::ones(2, DType::F32, device).unwrap()).unwrap()),
        [world_size as f64; 2]
    );
}
