#include "recovery/planner/plan_for_sources.h"

#include <utility>

namespace rekindle::planner {

namespace {

class PlanForSources final : public Plan {
 public:
  PlanForSources(std::shared_ptr<const Plan> by_class, std::vector<SourceIndex> class_of)
      : plan_(std::move(by_class)), class_of_(std::move(class_of)) {
    for (SourceIndex source = 0; source < class_of_.size(); ++source) {
      if (members_.size() <= class_of_[source]) members_.resize(class_of_[source] + 1);
      members_[class_of_[source]].set(source);
    }
  }

  SliceIndex slice_count() const override { return plan_->slice_count(); }
  std::uint64_t slice_bytes(SliceIndex slice) const override { return plan_->slice_bytes(slice); }
  SliceKind kind(SliceIndex slice) const override { return plan_->kind(slice); }
  SourceMask candidates(SliceIndex slice) const override {
    const SourceMask classes = plan_->candidates(slice);
    SourceMask sources;
    for (SourceIndex i = 0; i < members_.size(); ++i) {
      if (classes.test(i)) sources = sources | members_[i];
    }
    return sources;
  }
  std::uint32_t bucket(SliceIndex slice) const override { return plan_->bucket(slice); }
  std::uint32_t bucket_count() const override { return plan_->bucket_count(); }
  void expand(SliceIndex slice, SourceIndex source, Expansion& out) const override {
    plan_->expand(slice, class_of_[source], out);
  }
  bool covered_by(SliceIndex slice, const Layout& source, bool proves_parts) const override {
    return plan_->covered_by(slice, source, proves_parts);
  }
  void expand_from(SliceIndex slice, const Layout& source, Expansion& out) const override {
    plan_->expand_from(slice, source, out);
  }
  void tiles_read(SliceIndex slice, std::vector<TileIndex>& out) const override {
    plan_->tiles_read(slice, out);
  }
  void tiles(SliceIndex slice, std::vector<TileWork>& out) const override {
    plan_->tiles(slice, out);
  }
  SliceIndex group_first(SliceIndex slice) const override { return plan_->group_first(slice); }
  SliceIndex group_size(SliceIndex slice) const override { return plan_->group_size(slice); }
  std::uint64_t wire_bytes() const override { return plan_->wire_bytes(); }
  std::uint64_t wanted_bytes() const override { return plan_->wanted_bytes(); }
  std::span<const MissingBox> missing() const override { return plan_->missing(); }
  std::uint64_t memory_bytes() const override { return plan_->memory_bytes(); }

 private:
  const std::shared_ptr<const Plan> plan_;
  // By source.
  const std::vector<SourceIndex> class_of_;
  // By class.
  std::vector<SourceMask> members_;
};

}  // namespace

std::shared_ptr<const Plan> plan_for_sources(std::shared_ptr<const Plan> by_class,
                                             std::vector<SourceIndex> class_of) {
  return std::make_shared<PlanForSources>(std::move(by_class), std::move(class_of));
}

}  // namespace rekindle::planner
