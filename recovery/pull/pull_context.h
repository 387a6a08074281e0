#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_progress.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/silence.h"
#include "recovery/pull/source_finder.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::pull {

// What a pull wants, as far as it is known. TargetResolver fills it in from top to bottom.
struct PullTarget {
  Resolved resolved;
  std::shared_ptr<const Checkpoint> checkpoint;
  std::vector<TensorBox> wanted;
  std::optional<PackedLayout> packed;
};

// What the parts of one pull share. The job owns it.
struct PullContext {
  const PullEnvironment& environment;
  const PullRequest request;
  const PullTimes times;
  SourceFinder finder;
  Silence silence;
  PullProgress progress;
  PullTarget target = {};
};

}  // namespace rekindle::pull
