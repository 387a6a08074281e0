#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/box.h"
#include "src/tensor/tensor_set.h"

// What the ranks of a joint publication tell each other before they write: which tensors exist, and
// which boxes of them each rank has (docs/internals/joint-publication.md).
namespace rekindle {

// What one rank has of one tensor.
struct DeclaredTensor {
  TensorInfo info;  // shape of the whole tensor
  std::vector<Box> boxes;
  bool operator==(const DeclaredTensor&) const = default;
};

struct Declaration {
  std::uint32_t rank = 0;
  std::vector<DeclaredTensor> tensors;
  bool operator==(const Declaration&) const = default;
};

// The ranks of one agent.
struct JointHost {
  std::string name;
  std::vector<Declaration> ranks;
  bool operator==(const JointHost&) const = default;
};

// Of all hosts together. A tensor without boxes counts as one box.
inline constexpr std::size_t kMaxJointBoxes = 4'000'000;
// The canonical bytes of all hosts together: the lead keeps them, and every agent reads them.
inline constexpr std::uint64_t kMaxJointDeclarationBytes = std::uint64_t{1} << 30;
inline constexpr std::size_t kMaxHostNameBytes = 255;

// Canonical bytes of a host's declarations. Ranks ascend, the tensors of a rank by name, and the
// boxes of a tensor.
std::string serialize_declarations(const JointHost& host);
// kInvalid: not in canonical form, a tensor that TensorSet refuses, a box outside of its tensor, or
// too many boxes.
Result<JointHost> parse_declarations(std::string_view canonical);

}  // namespace rekindle
