#include "recovery/pull/pull_plans.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include <unistd.h>

#include "recovery/planner/plan_for_sources.h"
#include "src/base/failpoint.h"
#include "src/base/units.h"

namespace rekindle::pull {

namespace {

constexpr std::size_t kMostThreads = 8;
constexpr std::uint64_t kLeastBytes = 64 * kMiB;
constexpr std::uint64_t kMostBytes = kGiB;
constexpr std::size_t kMostTables = 256;
// Each pull waits for one table at a time.
constexpr std::size_t kQueue = 4096;
// Far longer than all the tables of a host's ranks take.
constexpr std::chrono::seconds kPatience{60};

// The memory of tables, nearly.
std::uint64_t bytes_of(const Checkpoint& checkpoint) {
  std::uint64_t bytes = checkpoint.tile_digests.size() * sizeof(Digest);
  for (const TensorInfo& tensor : checkpoint.tensors.tensors()) {
    bytes += sizeof tensor + tensor.name.size() + sizeof(TileGrid);
  }
  return bytes;
}

std::uint64_t bytes_of(const Layout& layout) {
  return layout.entries().size() * (sizeof(LayoutEntry) + sizeof(std::uint32_t));
}

std::uint64_t bytes_of(const PackedLayout& packed) {
  std::uint64_t bytes = bytes_of(packed.layout);
  for (const std::string& header : packed.headers) bytes += header.size();
  return bytes;
}

std::uint64_t bytes_of(const WantedSpec& spec) {
  std::uint64_t bytes = spec.shard.size() + spec.spec_json.size() + spec.tensors_regex.size();
  for (const NamedBox& box : spec.boxes) bytes += sizeof box + box.tensor.size();
  return bytes;
}

// A source of each class, and the class of each source.
struct Classes {
  std::map<SourceClass, PlanSource> by_key;
  std::vector<planner::SourceIndex> class_of;

  explicit Classes(const std::vector<PlanSource>& sources) {
    for (const PlanSource& source : sources) by_key.emplace(key_of(source), source);
    for (const PlanSource& source : sources) {
      const auto at = std::distance(by_key.begin(), by_key.find(key_of(source)));
      class_of.push_back(static_cast<planner::SourceIndex>(at));
    }
  }
  static SourceClass key_of(const PlanSource& source) {
    return {source.layout->digest(), source.growing, source.proves_parts};
  }
};

}  // namespace

PullPlans::Options PullPlans::for_this_host() {
  const auto pages = static_cast<std::uint64_t>(std::max(0L, ::sysconf(_SC_PHYS_PAGES)));
  const auto page_bytes = static_cast<std::uint64_t>(std::max(0L, ::sysconf(_SC_PAGESIZE)));
  Options options;
  options.threads =
      std::clamp<std::size_t>(std::thread::hardware_concurrency() / 4, 1, kMostThreads);
  options.bytes = std::clamp(pages * page_bytes / 64, kLeastBytes, kMostBytes);
  options.tables = kMostTables;
  return options;
}

PullPlans::PullPlans(const boost::asio::any_io_executor& executor, Options options)
    : turns_(executor),
      pool_("rk-plan", options.threads, kQueue),
      results_(executor, pool_, {options.bytes, options.tables, kPatience}) {}

template <typename Ref>
async::Task<Result<Ref>> PullPlans::get(Key key, Results::Compute compute) {
  CO_TRY(const Table table, co_await results_.get(std::move(key), std::move(compute)));
  co_return std::get<Ref>(table);
}

template <typename Ref>
Ref PullPlans::find(const Key& key) {
  const auto table = results_.find(key);
  return table ? std::get<Ref>(*table) : nullptr;
}

async::Task<Result<PullPlans::CheckpointRef>> PullPlans::parse(ModelVersion id, Digest root,
                                                               CheckpointBytes bytes) {
  const auto source = std::make_shared<const CheckpointBytes>(std::move(bytes));
  Results::Compute compute = [id, root, source]() -> Result<Results::Computed> {
    TRY_VOID(failpoint("plan.compute"));
    TRY(auto tensors, TensorSet::parse(source->tensors));
    if (tensors.digest() != source->tensor_set) {
      return fail(ErrorCode::kCorrupt, "the source sent a tensor list with another digest");
    }
    TRY(auto digests, parse_digests(source->tile_digests));
    // Checks that they hash to the root that was resolved.
    TRY(CheckpointRef checkpoint,
        Checkpoint::create(id, std::move(tensors), std::move(digests), root, source->signatures));
    const std::uint64_t size = bytes_of(*checkpoint);
    return Results::Computed{std::move(checkpoint), size};
  };
  // Alone: bytes of another pull's source that are wrong must not be blamed on this one's.
  Key key = CheckpointKey{root};
  CO_TRY(const Table table, co_await results_.compute_alone(std::move(compute), std::move(key)));
  co_return std::get<CheckpointRef>(table);
}

async::Task<Result<PullPlans::LayoutRef>> PullPlans::parse(CheckpointRef checkpoint, Digest layout,
                                                           std::string bytes) {
  const auto source = std::make_shared<const std::string>(std::move(bytes));
  Results::Compute compute = [checkpoint, layout, source]() -> Result<Results::Computed> {
    TRY_VOID(failpoint("plan.compute"));
    TRY(auto parsed, Layout::parse(checkpoint->tensors, *source));
    if (parsed.digest() != layout) {
      return fail(ErrorCode::kCorrupt, "the source sent a layout with another digest");
    }
    const std::uint64_t size = bytes_of(parsed);
    return Results::Computed{std::make_shared<const Layout>(std::move(parsed)), size};
  };
  Key key = LayoutKey{checkpoint->tensors.digest(), layout};
  CO_TRY(const Table table, co_await results_.compute_alone(std::move(compute), std::move(key)));
  co_return std::get<LayoutRef>(table);
}

PullPlans::CheckpointRef PullPlans::find_checkpoint(const ModelVersion& id, const Digest& root) {
  auto kept = find<CheckpointRef>(CheckpointKey{root});
  return kept != nullptr && kept->id == id ? kept : nullptr;
}

PullPlans::LayoutRef PullPlans::find_layout(const Digest& tensor_set, const Digest& layout) {
  return find<LayoutRef>(LayoutKey{tensor_set, layout});
}

// Kept tables must not keep copies: a copy that is retired gives its memory back.
async::Task<Result<PullPlans::LayoutRef>> PullPlans::layout_of(
    std::shared_ptr<const store::StoredVersion> stored) {
  const Manifest& manifest = stored->manifest;
  Key key = LayoutKey{manifest.checkpoint->tensors.digest(), manifest.layout.digest()};
  Results::Compute compute = [stored]() -> Result<Results::Computed> {
    TRY_VOID(failpoint("plan.compute"));
    auto layout = std::make_shared<const Layout>(stored->manifest.layout);
    const std::uint64_t size = bytes_of(*layout);
    return Results::Computed{std::move(layout), size};
  };
  co_return co_await get<LayoutRef>(std::move(key), std::move(compute));
}

async::Task<Result<PullPlans::WantedRef>> PullPlans::wanted(CheckpointRef checkpoint,
                                                            WantedSpec spec, std::string config) {
  Key key = WantedKey{checkpoint->tensors.digest(), spec, config};
  Results::Compute compute = [checkpoint, spec = std::move(spec),
                              config = std::move(config)]() -> Result<Results::Computed> {
    TRY_VOID(failpoint("plan.compute"));
    TRY(auto packed, wanted_layout(spec, *checkpoint, config));
    const std::uint64_t size = bytes_of(packed) + bytes_of(spec) + config.size();
    return Results::Computed{std::make_shared<const PackedLayout>(std::move(packed)), size};
  };
  co_return co_await get<WantedRef>(std::move(key), std::move(compute));
}

// Plans over classes of sources serve pulls with other sources of the same classes as well.
async::Task<Result<PullPlans::PlanRef>> PullPlans::plan(PlanInputs inputs) {
  Classes classes(inputs.sources);
  inputs.sources.clear();
  PlanKey key{inputs.checkpoint->tensors.digest(), inputs.destination->digest(), {}, inputs.trades};
  for (const auto& [name, source] : classes.by_key) {
    key.classes.push_back(name);
    inputs.sources.push_back(source);
  }
  const bool begun = inputs.verified && inputs.verified->count() > 0;
  Results::Compute compute = [inputs = std::move(inputs)]() -> Result<Results::Computed> {
    TRY_VOID(failpoint("plan.compute"));
    TRY(auto plan, plan_over(inputs));
    const std::uint64_t size = plan->memory_bytes();
    return Results::Computed{std::move(plan), size};
  };
  Result<Table> table = fail(ErrorCode::kInternal, "");
  if (begun) {
    table = co_await results_.compute_alone(std::move(compute));
  } else {
    Key kept_as = std::move(key);
    table = co_await results_.get(std::move(kept_as), std::move(compute));
  }
  if (!table) co_return fail(std::move(table).error());
  co_return planner::plan_for_sources(std::get<PlanRef>(*table), std::move(classes.class_of));
}

}  // namespace rekindle::pull
