#pragma once

#include <string>
#include <vector>

#include "proto/common.pb.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

// The copies of a store: what they were when they were last read, and what was found.
Json to_json(const proto::CopyStatus& copy);
std::string copies_text(const std::vector<proto::CopyStatus>& copies);

}  // namespace rekindle::cli
