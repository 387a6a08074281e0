#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/planner/slice_plan.h"
#include "recovery/pull/fetch_turns.h"
#include "recovery/pull/source_plan.h"
#include "recovery/pull/wanted.h"
#include "src/async/shared_results.h"
#include "src/async/task.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::pull {

// Sources that are the same to a plan.
struct SourceClass {
  Digest layout;
  bool growing = false;
  bool proves_parts = false;
  auto operator<=>(const SourceClass&) const = default;
};

// The tables of pulls: parsed metadata, the boxes of a shard, plans. With a hundred thousand
// tensors each takes tenths of a second, so planning threads compute them while the pull waits.
// Pulls of this host that need the same table share it, also one after the other. Tables never
// change. Control thread only.
//
// A call that is cancelled ends at once. Its computation goes on, and owns all that it uses.
class PullPlans {
 public:
  struct Options {
    std::size_t threads = 1;
    // Of the tables that are kept for later pulls. A table's own memory counts; the tables that it
    // refers to count where they are kept.
    std::uint64_t bytes = 0;
    std::size_t tables = 0;
  };
  // A quarter of the cores and a sixty-fourth of the memory of this machine, within bounds.
  static Options for_this_host();

  PullPlans(const boost::asio::any_io_executor& executor, Options options);

  using CheckpointRef = std::shared_ptr<const Checkpoint>;
  using LayoutRef = std::shared_ptr<const Layout>;
  using WantedRef = std::shared_ptr<const PackedLayout>;
  using PlanRef = std::shared_ptr<const planner::Plan>;

  // Metadata as peers send it. The digest that names it is checked (kCorrupt).
  struct CheckpointBytes {
    Digest tensor_set;
    std::string tensors;
    std::string tile_digests;
    std::vector<VersionSignature> signatures = {};
  };
  async::Task<Result<CheckpointRef>> parse(ModelVersion id, Digest root, CheckpointBytes bytes);
  async::Task<Result<LayoutRef>> parse(CheckpointRef checkpoint, Digest layout, std::string bytes);
  // Null: not kept here. A root is that of one version, but somebody may have claimed another one
  // with it.
  CheckpointRef find_checkpoint(const ModelVersion& id, const Digest& root);
  LayoutRef find_layout(const Digest& tensor_set, const Digest& layout);
  // The layout of a copy, without the copy.
  async::Task<Result<LayoutRef>> layout_of(std::shared_ptr<const store::StoredVersion> stored);

  // The boxes of `spec`, laid out in files. `config`: see wanted_boxes().
  async::Task<Result<WantedRef>> wanted(CheckpointRef checkpoint, WantedSpec spec,
                                        std::string config);
  async::Task<Result<PlanRef>> plan(PlanInputs inputs);
  // Runs `work` on the threads of the plans, for one caller.
  template <typename T>
  async::Task<Result<T>> run(std::function<Result<T>()> work) {
    const auto out = std::make_shared<std::optional<T>>();
    Results::Compute compute = [out, work = std::move(work)]() -> Result<Results::Computed> {
      TRY(*out, work());
      return Results::Computed{};
    };
    CO_TRY_VOID(co_await results_.compute_alone(std::move(compute)));
    co_return std::move(**out);
  }

  // For what peers send.
  FetchTurns& turns() { return turns_; }

  std::uint64_t kept_bytes() const { return results_.kept_bytes(); }

 private:
  struct CheckpointKey {
    Digest root;
    auto operator<=>(const CheckpointKey&) const = default;
  };
  struct LayoutKey {
    Digest tensor_set;
    Digest layout;
    auto operator<=>(const LayoutKey&) const = default;
  };
  struct WantedKey {
    Digest tensor_set;
    WantedSpec spec;
    std::string config;
    auto operator<=>(const WantedKey&) const = default;
  };
  // The tiles of the destination are no part of it: plans for a destination that has some already
  // are not kept.
  struct PlanKey {
    Digest tensor_set;
    Digest destination;
    std::vector<SourceClass> classes;  // ascending
    bool trades = false;
    auto operator<=>(const PlanKey&) const = default;
  };
  using Key = std::variant<CheckpointKey, LayoutKey, WantedKey, PlanKey>;
  using Table = std::variant<std::monostate, CheckpointRef, LayoutRef, WantedRef, PlanRef>;
  using Results = async::SharedResults<Key, Table>;

  template <typename Ref>
  async::Task<Result<Ref>> get(Key key, Results::Compute compute);
  template <typename Ref>
  Ref find(const Key& key);

  FetchTurns turns_;
  WorkerPool pool_;
  // Ends before the pool: computations that have not begun are left out.
  Results results_;
};

}  // namespace rekindle::pull
