#pragma once

#include <cstddef>
#include <string>

#include "proto/coordinator.pb.h"

namespace rekindle::cli {

enum class TopOrder { kRate, kName };

// The fleet as `rekindle top` shows it: what is wrong first, then what moves. Each line fits into
// `width` columns. `height` lines at most, of which hosts and pulls share what is left; 0: all of
// them. `title` ends the first line.
std::string top_frame(const proto::ClusterStatusResponse& status, TopOrder order,
                      const std::string& title, std::size_t width, std::size_t height);

}  // namespace rekindle::cli
