#pragma once

#include <string>

namespace rekindle::cli {

struct BuildInfo {
  std::string version, compiler, build_type;
  bool verbs = false, cuda = false, nccl = false;
  std::string digest_simd;  // what this CPU uses
};
BuildInfo build_info();

}  // namespace rekindle::cli
