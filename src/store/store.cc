#include <algorithm>

#include <sys/statvfs.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/store/files.h"
#include "src/store/publish_copy.h"
#include "src/store/pull_copy.h"
#include "src/store/segment_store.h"
#include "src/store/store_directory.h"
#include "src/store/store_state.h"

namespace rekindle::store {

namespace {

// Begun by a pull and not committed, as opposed to a copy that cannot be read or removed.
bool is_unfinished(const fs::path& directory) {
  std::error_code ignored;
  return fs::exists(directory / kPartialManifestName, ignored) &&
         !fs::exists(directory / kManifestName, ignored) &&
         !fs::exists(directory / kRetiredName, ignored);
}

class Store final : public SegmentStore {
 public:
  explicit Store(std::shared_ptr<StoreState> state) : state_(std::move(state)) {}

  std::vector<std::shared_ptr<const StoredVersion>> versions() const override {
    return state_->versions();
  }
  std::vector<std::shared_ptr<const StoredVersion>> find(const ModelVersion& id) const override {
    return state_->find(id);
  }
  std::shared_ptr<const StoredVersion> find(const ModelVersion& id,
                                            const Digest& layout) const override {
    return state_->find(id, layout);
  }

  Result<std::unique_ptr<PendingVersion>> begin(std::shared_ptr<const Checkpoint> checkpoint,
                                                PackedLayout layout, int preferred_node) override {
    TRY(auto copy,
        PullCopy::begin(state_, std::move(checkpoint), std::move(layout), preferred_node));
    return std::unique_ptr<PendingVersion>(std::move(copy));
  }
  std::uint64_t missing_bytes(const ModelVersion& id, const Layout& layout) const override {
    return state_->missing_bytes(copy_directory(state_->directory(), id, layout.digest()),
                                 layout.segment_bytes());
  }
  Result<std::shared_ptr<const StoredVersion>> commit(
      std::unique_ptr<PendingVersion> pending) override {
    TRY(auto version, static_cast<PullCopy&>(*pending).commit());
    drop_unfinished_before(version->manifest.checkpoint->id);
    return version;
  }
  void discard(std::unique_ptr<PendingVersion> pending) override {
    static_cast<PullCopy&>(*pending).discard();
  }
  Result<std::uint64_t> discard_unfinished_before(const ModelVersion& id) override {
    return discard_unfinished_before(id, Deletion::kNow);
  }

  Result<std::shared_ptr<Staged>> stage(
      const ModelVersion& id, std::span<const fs::path> paths,
      const std::function<void(const PublishProgress&)>& progress) override {
    return stage_files(state_, id, paths, progress);
  }
  Result<std::shared_ptr<Staged>> stage_segments(
      const ModelVersion& id, FilledSegments filled,
      const std::function<void(const PublishProgress&)>& progress) override {
    return stage_filled(state_, id, std::move(filled), progress);
  }
  const Manifest& staged_manifest(const Staged& staged) const override { return staged.manifest; }
  Result<std::shared_ptr<StagedPart>> stage_part(const ModelVersion& id,
                                                 FilledSegments filled) override {
    return store::stage_part(state_, id, std::move(filled));
  }
  const std::map<TileIndex, Digest>& staged_leaves(const StagedPart& part) const override {
    return part.leaves;
  }
  std::span<const std::byte> staged_array(const StagedPart& part,
                                          const LayoutEntry& entry) const override {
    const std::uint64_t bytes =
        entry.box.elements() * dtype_size_bytes(part.tensors[entry.tensor].dtype);
    return part.copy->segment(entry.segment).bytes().subspan(entry.offset_bytes, bytes);
  }
  Result<std::shared_ptr<Staged>> finish_part(std::shared_ptr<StagedPart> part,
                                              std::shared_ptr<const Checkpoint> checkpoint,
                                              std::vector<PartDigest> part_digests,
                                              std::vector<Digest> part_layouts) override {
    return store::finish_part(*state_, std::move(part), std::move(checkpoint),
                              std::move(part_digests), std::move(part_layouts));
  }
  Result<void> sign_staged(Staged& staged, std::span<const VersionSignature> signatures) override {
    return store::sign_staged(*state_, staged, signatures);
  }
  Result<std::shared_ptr<const StoredVersion>> commit_staged(
      std::shared_ptr<Staged> staged) override {
    const Checkpoint& checkpoint = *staged->manifest.checkpoint;
    if (staged->existing) return staged->existing;
    TRY_VOID(state_->check_root(checkpoint.id, checkpoint.root));
    if (auto same = state_->find(checkpoint.id, staged->manifest.layout.digest())) {
      // Staged twice at the same time: the first one counts if it is verified. Otherwise the copy
      // that was just digested replaces it, unless a process has written to its files meanwhile.
      if (same->verification->state() == CopyState::kVerified) return same;
      TRY_VOID(staged->copy->check_unwritten());
      TRY_VOID(remove(state_->retire_copy(*same), Deletion::kLater));
    }
    TRY(auto version, staged->copy->put_in_place(staged->manifest));
    staged->copy.reset();
    drop_unfinished_before(checkpoint.id);
    return version;
  }
  void discard_staged(std::shared_ptr<Staged> staged) override { staged->copy.reset(); }

  Result<std::uint64_t> retire(const ModelVersion& id) override {
    return remove_found(id, state_->retire(id));
  }

  Result<std::uint64_t> retire_copy(const StoredVersion& copy) override {
    return remove_found(copy.manifest.checkpoint->id, state_->retire_copy(copy));
  }

  Result<SetAside> set_aside(const StoredVersion& copy, std::span<const TileIndex> bad) override {
    return store::set_aside(*state_, copy, bad);
  }
  bool is_left_over(const ModelVersion& id, const Digest& layout) const override {
    return state_->is_left(copy_directory(state_->directory(), id, layout));
  }

  Result<std::shared_ptr<MappedSegment>> create_segment(const fs::path& path,
                                                        std::uint64_t size_bytes) override {
    const std::uint64_t room = state_->room_bytes();
    return state_->pool().create(path, size_bytes, room - std::min(room, size_bytes),
                                 {.written_elsewhere = true});
  }
  Result<void> remove_segment(const fs::path& path) override {
    return state_->pool().put(path, Deletion::kNow);
  }
  void never_reuse(const MappedSegment& segment) override { state_->pool().give_up(segment); }
  std::uint64_t pooled_bytes() const override { return state_->pool().bytes(); }
  Result<std::uint64_t> top_up_reserve(
      const std::function<void(MappedSegment&)>& prepare) override {
    return state_->pool().top_up(state_->room_bytes(), prepare);
  }
  void trim_pool(TimePoint now) override { state_->pool().trim(now); }

  std::uint64_t used_bytes() const override { return state_->used_bytes(); }
  std::uint64_t budget_bytes() const override { return state_->budget_bytes(); }
  const fs::path& directory() const override { return state_->directory(); }

 private:
  Result<std::uint64_t> remove_found(const ModelVersion& id, const StoreState::Retired& retired) {
    if (retired.directories.empty()) {
      return fail(ErrorCode::kNotFound, "{} is not in store {}", id.to_string(),
                  state_->directory().string());
    }
    return remove(retired, Deletion::kNow);
  }

  Result<std::uint64_t> remove(const StoreState::Retired& retired, Deletion when) {
    Result<void> result;
    // Other processes may write to the files of a copy that is not verified, or their memory may be
    // bad. So no other copy gets them.
    for (const auto& copy : retired.copies) {
      if (copy->verification->state() == CopyState::kVerified) continue;
      for (const auto& segment : copy->segments) state_->pool().give_up(*segment);
    }
    for (const auto& [directory, id] : retired.directories) {
      auto removed = remove_copy(directory, state_->pool(), when);
      state_->release(directory, id, removed ? 0 : disk_bytes(directory));
      if (!removed) result = std::move(removed);
    }
    TRY_VOID(result);
    return retired.bytes;
  }

  Result<std::uint64_t> discard_unfinished_before(const ModelVersion& id, Deletion when) {
    std::vector<fs::path> unfinished = state_->left_before(id);
    std::erase_if(unfinished, [](const fs::path& directory) { return !is_unfinished(directory); });
    return remove(state_->retire_left(unfinished), when);
  }

  // After a commit, which stays valid if this fails.
  void drop_unfinished_before(const ModelVersion& id) {
    if (const auto freed = discard_unfinished_before(id, Deletion::kLater); !freed) {
      log::warn("store.clean", "before", id.to_string(), "error", freed.error());
    }
  }

  const std::shared_ptr<StoreState> state_;
};

Result<std::uint64_t> default_budget(const fs::path& directory) {
  struct statvfs status {};
  if (::statvfs(directory.c_str(), &status) != 0) return fail_errno(errno, directory.string());
  return std::uint64_t{status.f_blocks} * status.f_frsize / 10 * 9;
}

}  // namespace

Result<std::unique_ptr<SegmentStore>> SegmentStore::open(const StoreOptions& options) {
  std::error_code ignored;
  const fs::path directory = fs::absolute(options.directory, ignored).lexically_normal();
  auto placement = std::make_unique<NumaPlacement>();
  TRY_VOID(placement->choose(options.numa, usable_numa_nodes()));
  TRY(UniqueFd lock, open_store_directory(directory));
  std::uint64_t budget_bytes = options.budget_bytes;
  if (budget_bytes == 0) {
    TRY(budget_bytes, default_budget(directory));
  }
  auto state = std::make_shared<StoreState>(
      directory, std::move(lock), budget_bytes, options.pool_bytes.value_or(budget_bytes / 4),
      options.reserve_bytes, std::move(placement), options.evidence);
  TRY_VOID(scan_store(*state, options.trust));
  return std::unique_ptr<SegmentStore>(std::make_unique<Store>(std::move(state)));
}

}  // namespace rekindle::store
