// Times Horovod's Adasum over MPI, AdasumMPIAllreduceOp::Execute, as one rank of an MPI job:
//
//     mpirun -n RANKS horovod DTYPE BYTES WARM_UPS ITERATIONS
//
// `cargo xtask compare horovod` compiles this file, and links it with the unmodified sources of Horovod's own distribution. The global
// state is set up as in Horovod's InitializeHorovodOnce and BackgroundThreadLoop; only the thread that waits for requests of a framework is
// left out, so that its cycle time is not measured. Rank 0 prints one JSON object.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "half.h"
#include "mpi/mpi_controller.h"
#include "ops/adasum_mpi_operations.h"

namespace hvd = horovod::common;

namespace {

// The period of a vector's elements: a prime, so that the two halves of a vector whose length is a power of two differ.
constexpr size_t kPeriod = 4093;
// The unit roundoff of the products and coefficients, which Horovod computes in double.
constexpr double kDoubleRoundoff = 0x1p-53;
constexpr double kFloatRoundoff = 0x1p-24;
// The alignment of PyTorch's tensors.
constexpr size_t kAlignment = 64;

// A dtype of Horovod, with the errors of rounding to it.
struct Type {
  const char* name;
  hvd::DataType horovod;
  size_t bytes;
  // Relative error of one element of a weighted sum of two vectors, whatever the arithmetic.
  double roundoff;
  // Absolute error of a subnormal element.
  double smallest;
  // Relative error of a coefficient in the precision of that arithmetic.
  double coefficient_roundoff;

  double get(const void* data, size_t index) const {
    switch (horovod) {
    case hvd::HOROVOD_FLOAT64:
      return static_cast<const double*>(data)[index];
    case hvd::HOROVOD_FLOAT32:
      return static_cast<const float*>(data)[index];
    default:
      float value;
      hvd::HalfBits2Float(static_cast<const unsigned short*>(data) + index, &value);
      return value;
    }
  }

  void set(void* data, size_t index, double value) const {
    float narrow = static_cast<float>(value);
    switch (horovod) {
    case hvd::HOROVOD_FLOAT64:
      static_cast<double*>(data)[index] = value;
      break;
    case hvd::HOROVOD_FLOAT32:
      static_cast<float*>(data)[index] = narrow;
      break;
    default:
      hvd::Float2HalfBits(&narrow, static_cast<unsigned short*>(data) + index);
    }
  }
};

// f64: two products and a sum. f32: these in double, and one rounding. f16: a product and a fused multiply-add in float, and one rounding.
const Type kTypes[] = {
    {"f64", hvd::HOROVOD_FLOAT64, 8, 3 * kDoubleRoundoff, 0x1p-1074, 0.0},
    {"f32", hvd::HOROVOD_FLOAT32, 4, kFloatRoundoff + 3 * kDoubleRoundoff, 0x1p-150, 0.0},
    {"f16", hvd::HOROVOD_FLOAT16, 2, 0x1p-11 + 2 * kFloatRoundoff, 0x1p-25, kFloatRoundoff},
};

// A framework's tensor, with the members that Horovod uses.
class Vector : public hvd::Tensor {
public:
  Vector(const Type& type, size_t len) : type_(type), len_(len) {
    size_t bytes = (len * type.bytes + kAlignment - 1) / kAlignment * kAlignment;
    data_ = std::aligned_alloc(kAlignment, bytes);
    if (data_ == nullptr) {
      throw std::runtime_error("no memory for " + std::to_string(bytes) + " bytes");
    }
  }
  Vector(const Vector&) = delete;
  ~Vector() override { std::free(data_); }

  const hvd::DataType dtype() const override { return type_.horovod; }
  const hvd::TensorShape shape() const override {
    hvd::TensorShape shape;
    shape.AddDim(static_cast<int64_t>(len_));
    return shape;
  }
  const void* data() const override { return data_; }
  int64_t size() const override { return static_cast<int64_t>(len_ * type_.bytes); }

  // Fills the vector with repetitions of one period.
  void fill(const std::vector<double>& period) {
    for (size_t i = 0; i < len_; i++) {
      type_.set(data_, i, period[i % kPeriod]);
    }
  }
  double at(size_t index) const { return type_.get(data_, index); }
  size_t len() const { return len_; }

private:
  const Type& type_;
  size_t len_;
  void* data_;
};

// One period of every rank's vector: the sum of a common part and a part of the rank's own, as in gradients.
std::vector<std::vector<double>> inputs(const Type& type, int ranks) {
  uint64_t state = 0x9e3779b97f4a7c15;
  auto uniform = [&state] {
    state = state * 6364136223846793005 + 1442695040888963407;
    return static_cast<double>(state >> 11) * 0x1p-52 - 1.0;
  };
  std::vector<double> common(kPeriod);
  std::generate(common.begin(), common.end(), uniform);
  std::vector<std::vector<double>> all(ranks, std::vector<double>(kPeriod));
  for (int rank = 0; rank < ranks; rank++) {
    for (size_t i = 0; i < kPeriod; i++) {
      double element[1];
      type.set(element, 0, (1.0 + rank / 8.0) * (0.5 * common[i] + 0.5 * uniform()));
      all[rank][i] = type.get(element, 0);
    }
  }
  return all;
}

// A node of Adasum's tree, as weights of the ranks' vectors, with a bound of the error of Horovod's result: for each element, the sum of
// `errors` times the magnitudes of the ranks' elements, plus `absolute`.
struct Node {
  std::vector<double> weights;
  std::vector<double> errors;
  double absolute = 0.0;
};

// Adasum by its definition, from the inner products of the ranks' vectors; the vectors of inner nodes are never formed.
class Oracle {
public:
  Oracle(const Type& type, const std::vector<std::vector<double>>& inputs, size_t len)
      : type_(type), ranks_(inputs.size()), len_(len), products_(ranks_ * ranks_) {
    for (size_t r = 0; r < ranks_; r++) {
      for (size_t s = 0; s < ranks_; s++) {
        long double sum = 0.0;
        for (size_t i = 0; i < kPeriod && i < len; i++) {
          size_t times = (len - i + kPeriod - 1) / kPeriod;
          sum += static_cast<long double>(inputs[r][i]) * inputs[s][i] * times;
        }
        products_[r * ranks_ + s] = static_cast<double>(sum);
      }
    }
  }

  Node tree() const {
    std::vector<Node> level(ranks_);
    for (size_t rank = 0; rank < ranks_; rank++) {
      level[rank].weights.assign(ranks_, 0.0);
      level[rank].errors.assign(ranks_, 0.0);
      level[rank].weights[rank] = 1.0;
    }
    for (; level.size() > 1; level.resize(level.size() / 2)) {
      for (size_t pair = 0; 2 * pair < level.size(); pair++) {
        level[pair] = join(level[2 * pair], level[2 * pair + 1]);
      }
    }
    return level[0];
  }

private:
  double product(const Node& a, const Node& b) const {
    double sum = 0.0;
    for (size_t r = 0; r < ranks_; r++) {
      for (size_t s = 0; s < ranks_; s++) {
        sum += a.weights[r] * b.weights[s] * products_[r * ranks_ + s];
      }
    }
    return sum;
  }

  // The largest distance of Horovod's vector from the node's, in the Euclidean norm.
  double distance(const Node& node) const {
    double sum = node.absolute * std::sqrt(static_cast<double>(len_));
    for (size_t r = 0; r < ranks_; r++) {
      sum += node.errors[r] * std::sqrt(products_[r * ranks_ + r]);
    }
    return sum;
  }

  // The coefficient of a vector, and the largest error of Horovod's coefficient.
  struct Coefficient {
    double value;
    double error;
  };

  Coefficient coefficient(double dot, double dot_error, double square, double square_error) const {
    double part = dot / square;
    double error = (dot_error + std::abs(part) * square_error) / (2.0 * (square - square_error));
    error += 4 * kDoubleRoundoff * (1.0 + std::abs(part));
    double value = 1.0 - part / 2.0;
    return {value, error + type_.coefficient_roundoff * (std::abs(value) + error)};
  }

  Node join(const Node& a, const Node& b) const {
    double dot = product(a, b), a_square = product(a, a), b_square = product(b, b);
    double a_norm = std::sqrt(a_square), b_norm = std::sqrt(b_square);
    double a_off = distance(a), b_off = distance(b);
    // The rounding error of sums of `len_` terms, in any order, and of the ranks' partial sums, by the Cauchy-Schwarz inequality.
    double summing = (static_cast<double>(len_) + 8.0) * kDoubleRoundoff;
    auto error = [summing](double x, double x_off, double y, double y_off) {
      return x * y_off + x_off * y + x_off * y_off + summing * (x + x_off) * (y + y_off);
    };
    double dot_error = error(a_norm, a_off, b_norm, b_off);
    Coefficient left = coefficient(dot, dot_error, a_square, error(a_norm, a_off, a_norm, a_off));
    Coefficient right = coefficient(dot, dot_error, b_square, error(b_norm, b_off, b_norm, b_off));

    Node node;
    node.absolute = type_.smallest;
    node.weights.assign(ranks_, 0.0);
    node.errors.assign(ranks_, 0.0);
    auto add = [&](const Node& child, Coefficient by) {
      double most = std::abs(by.value) + by.error;
      node.absolute += most * child.absolute * (1.0 + type_.roundoff);
      for (size_t r = 0; r < ranks_; r++) {
        double magnitude = std::abs(child.weights[r]);
        node.weights[r] += by.value * child.weights[r];
        node.errors[r] += most * child.errors[r] + by.error * magnitude;
        node.errors[r] += type_.roundoff * most * (magnitude + child.errors[r]);
      }
    };
    add(a, left);
    add(b, right);
    return node;
  }

  const Type& type_;
  size_t ranks_;
  size_t len_;
  std::vector<double> products_;
};

// The number of wrong elements, and the largest ratio of an error to its bound.
struct Verdict {
  unsigned long long wrong = 0;
  double worst = 0.0;
};

Verdict check(const Vector& found, const Node& node, const std::vector<std::vector<double>>& inputs) {
  std::vector<double> expected(kPeriod, 0.0), bound(kPeriod, node.absolute);
  for (size_t i = 0; i < kPeriod; i++) {
    for (size_t r = 0; r < inputs.size(); r++) {
      expected[i] += node.weights[r] * inputs[r][i];
      // This function's own sum is in double too.
      double own = 2.0 * static_cast<double>(inputs.size()) * kDoubleRoundoff * std::abs(node.weights[r]);
      bound[i] += (node.errors[r] + own) * std::abs(inputs[r][i]);
    }
  }
  Verdict verdict;
  for (size_t i = 0; i < found.len(); i++) {
    double off = std::abs(found.at(i) - expected[i % kPeriod]) / bound[i % kPeriod];
    // Comparisons with NaN are false.
    verdict.wrong += !(off <= 1.0);
    verdict.worst = std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(verdict.worst, off);
  }
  return verdict;
}

// Global, as in Horovod: the state is too large for the stack.
hvd::HorovodGlobalState state;
hvd::MPIContext mpi_context;

void run(const Type& type, size_t bytes, int warm_ups, int iterations) {
  hvd::MPIContextManager manager;
  state.cpu_operation = hvd::LibType::MPI;
  state.control_operation = hvd::LibType::MPI;
  mpi_context.Enable({});
  hvd::ProcessSet& all = state.process_set_table.Get(0);
  all.controller.reset(new hvd::MPIController(all.response_cache, all.tensor_queue, state.timeline,
                                              state.parameter_manager, all.group_table,
                                              state.timeline_controller, all.mpi_context));
  state.global_controller = all.controller;
  mpi_context.Initialize(manager);
  state.process_set_table.Initialize(mpi_context);

  int rank = all.controller->GetRank(), ranks = all.controller->GetSize();
  if (ranks & (ranks - 1)) {
    throw std::invalid_argument("Horovod's Adasum takes a power of two of ranks, not " + std::to_string(ranks));
  }
  std::vector<std::vector<double>> vectors = inputs(type, ranks);
  auto vector = std::make_shared<Vector>(type, bytes / type.bytes);
  vector->fill(vectors[rank]);
  hvd::TensorTableEntry entry;
  entry.tensor_name = "gradients";
  // In place, as hvd.allreduce_, which saves Horovod a copy.
  entry.tensor = entry.output = vector;
  std::vector<hvd::TensorTableEntry> entries{entry};
  hvd::Response response;
  response.set_response_type(hvd::Response::ResponseType::ADASUM);
  response.set_prescale_factor(1.0);
  response.set_postscale_factor(1.0);

  hvd::AdasumMPIAllreduceOp adasum(&mpi_context, &state);
  auto execute = [&] {
    hvd::Status status = adasum.Execute(entries, response);
    if (!status.ok()) {
      throw std::runtime_error(status.reason());
    }
  };
  std::vector<double> seconds;
  for (int round = 0; round < warm_ups + iterations; round++) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    execute();
    double elapsed = MPI_Wtime() - start;
    if (round >= warm_ups) {
      seconds.push_back(elapsed);
    }
  }
  // The slowest rank determines the time.
  MPI_Allreduce(MPI_IN_PLACE, seconds.data(), iterations, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);

  vector->fill(vectors[rank]);
  execute();
  Verdict verdict = check(*vector, Oracle(type, vectors, vector->len()).tree(), vectors);
  MPI_Allreduce(MPI_IN_PLACE, &verdict.wrong, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, &verdict.worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0) {
    std::printf("{\"wrong\": %llu, \"worst_error_of_bound\": %.3g, \"times_us\": [", verdict.wrong,
                std::min(verdict.worst, std::numeric_limits<double>::max()));
    for (size_t i = 0; i < seconds.size(); i++) {
      std::printf("%s%.3f", i == 0 ? "" : ", ", seconds[i] * 1e6);
    }
    std::printf("]}\n");
    std::fflush(stdout);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

} // namespace

int main(int count, char** arguments) {
  try {
    if (count != 5) {
      throw std::invalid_argument("expected DTYPE BYTES WARM_UPS ITERATIONS");
    }
    const Type* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                    [&](const Type& type) { return type.name == std::string(arguments[1]); });
    if (type == std::end(kTypes)) {
      throw std::invalid_argument(std::string("Horovod has no Adasum for ") + arguments[1]);
    }
    run(*type, std::stoull(arguments[2]), std::stoi(arguments[3]), std::stoi(arguments[4]));
    MPI_Finalize();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "horovod: %s\n", error.what());
    int is_running = 0;
    MPI_Initialized(&is_running);
    if (is_running) {
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return 1;
  }
}
