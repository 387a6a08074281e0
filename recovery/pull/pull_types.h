#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "recovery/trace/span.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/tensor/box.h"
#include "src/tensor/version_signature.h"

namespace rekindle::store {
struct SetAside;
}

// The request for a pull and its results, for the command line and the local channel.
namespace rekindle::pull {

// A part of a tensor, as a worker names it. The whole tensor when both have rank 0.
struct NamedBox {
  std::string tensor;
  Dims offset;
  Dims extent;
  auto operator<=>(const NamedBox&) const = default;
};

struct PullRequest {
  ModelRef ref;
  // The version must have this root. nil: any root.
  Digest root;
  std::string shard;          // "tp=3/8"; "" = whole
  std::string spec_json;      // contents of --spec; "" = built in, by the checkpoint's config.json
  std::string tensors_regex;  // names tensors instead of a shard
  std::vector<std::string> from;
  std::string transport;  // "", "tcp", "shm" or "verbs"
  // Over encrypted data streams only. An agent that runs so itself does it for every pull.
  bool encrypt = false;
  std::filesystem::path to;  // "" = into the store; else a complete checkpoint directory
  // With `to`: writes files that Python runs when a model is loaded.
  bool allow_code = false;
  std::filesystem::path fallback;    // rung 4: a directory of safetensors files
  std::vector<NamedBox> boxes = {};  // names boxes instead of a shard
  // As PullTimes::silence. 0: the default.
  std::chrono::milliseconds silence = {};
  // Older versions may go where the budget is too small.
  bool make_room = true;
  // Completes exactly this copy of the own store. Replaces the shard, the tensors and the boxes.
  std::shared_ptr<const store::SetAside> mend = nullptr;
  // The GPUs of the workers that wait for it: "GPU-6f2c…"; "": a worker without one.
  std::vector<std::string> devices = {};
  // Beside that of the agent.
  PublisherTrust trust = {};
  // The span that the pull belongs to.
  trace::Context trace = {};
};

struct PullTimes {
  // For a coordinator to answer.
  std::chrono::milliseconds resolve{4500};
  // How long a pull looks for sources while none of them sends a byte.
  std::chrono::milliseconds silence{4000};
  // For holders to verify copies that they have just found: terabytes, from a disk.
  std::chrono::milliseconds verifying{600'000};
};

struct SourceLine {
  std::string name;
  std::string transport;
  std::uint64_t bytes = 0;
  double bytes_per_second = 0;
  bool lost = false;
  std::string cause;
};

struct Progress {
  std::string phase;  // resolve, plan, allocate, connect, transfer, verify, commit, copy
  ModelVersion id;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  double bytes_per_second = 0;
  std::vector<SourceLine> sources;
  std::string note;  // one line worth showing, "" most of the time
};
using OnProgress = std::function<void(const Progress&)>;

struct Phase {
  std::string name;
  std::chrono::microseconds elapsed{0};
};

struct TransferSummary {
  ModelVersion id;
  Digest root;
  Digest layout;
  std::filesystem::path path;
  std::uint64_t bytes = 0;            // now held
  std::uint64_t fetched_bytes = 0;    // over the wire this time
  std::uint64_t resumed_bytes = 0;    // verified by an earlier try
  std::uint64_t refetched_bytes = 0;  // wrong or unfinished, fetched again
  std::uint32_t tensors = 0;          // without the small files
  std::chrono::milliseconds elapsed{0};
  std::vector<Phase> phases;
  std::vector<SourceLine> sources;
  std::vector<VersionSignature> signatures;
  // Files with code that were not written to PullRequest::to.
  std::vector<std::string> left_out;
};

// pull --dry-run: the plan, nothing transferred.
struct PlanSummary {
  ModelVersion id;
  Digest root;
  std::uint32_t tensors = 0;  // without the small files
  std::uint64_t wanted_bytes = 0;
  std::uint64_t wire_bytes = 0;
  std::uint32_t slices = 0;
  std::uint32_t buckets = 0;
  struct PerSource {
    std::string name;
    std::string endpoint;
    // Bytes of the plan that it can give.
    std::uint64_t bytes_available = 0;
  };
  std::vector<PerSource> sources;
  struct Tensor {
    std::string name;
    std::string dtype;
    std::string shape;
    std::string box;
    std::uint64_t bytes = 0;
  };
  // Through an agent the lists may end early; the totals are exact.
  std::vector<Tensor> wanted;
  std::vector<std::string> missing;  // one line each
  std::uint64_t wanted_total = 0;
  std::uint64_t missing_total = 0;
};

}  // namespace rekindle::pull
