#pragma once

#include <string>

namespace rekindle::cli {

struct BuildInfo {
  std::string version, compiler, build_type;
  bool verbs = false, cuda = false, nccl = false;
  // The instruction set that this CPU uses.
  std::string digest_simd;
};
BuildInfo build_info();

}  // namespace rekindle::cli
