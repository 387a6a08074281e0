#include "src/bucket/helped_upload.h"

#include <algorithm>
#include <utility>

#include "src/base/failpoint.h"
#include "src/base/units.h"
#include "src/bucket/slots.h"

namespace rekindle::bucket {

namespace {

void cut_run(const Upload& copy, std::uint64_t row, std::uint64_t begin, std::uint64_t end,
             std::vector<Upload>& out) {
  const std::uint64_t at = copy.to + row * copy.to_stride;
  const std::uint64_t first = std::max(at, begin);
  const std::uint64_t last = std::min(at + copy.run_bytes, end);
  if (first >= last) return;
  out.push_back(
      {copy.from + row * copy.from_stride + (first - at), first - begin, last - first, 1, 0, 0});
}

// Rows that lie in the range as a whole stay one copy.
void cut_rows(const Upload& copy, std::uint64_t begin, std::uint64_t end,
              std::vector<Upload>& out) {
  const std::uint64_t stride = copy.to_stride;
  if (end <= copy.to) return;
  std::uint64_t first = 0;
  if (begin >= copy.to + copy.run_bytes) first = (begin - copy.to - copy.run_bytes) / stride + 1;
  std::uint64_t past = std::min(copy.rows, (end - copy.to - 1) / stride + 1);
  const auto is_whole = [&](std::uint64_t row) {
    const std::uint64_t at = copy.to + row * stride;
    return at >= begin && at + copy.run_bytes <= end;
  };
  if (first < past && !is_whole(first)) cut_run(copy, first++, begin, end, out);
  if (first < past && !is_whole(past - 1)) cut_run(copy, --past, begin, end, out);
  if (first >= past) return;
  out.push_back({copy.from + first * copy.from_stride, copy.to + first * stride - begin,
                 copy.run_bytes, past - first, copy.from_stride, stride});
}

}  // namespace

void cut_uploads(std::span<const Upload> copies, std::uint64_t begin, std::uint64_t end,
                 std::vector<Upload>& out) {
  for (const Upload& copy : copies) {
    if (copy.rows == 1) {
      cut_run(copy, 0, begin, end, out);
    } else {
      cut_rows(copy, begin, end, out);
    }
  }
}

Result<std::unique_ptr<Helper>> Helper::create(std::unique_ptr<Loan> loan, Device& target,
                                               std::uint64_t staging_bytes, double free_fraction) {
  Device& device = loan->device();
  TRY_VOID(device.reach_peer(target));
  TRY(const DeviceMemory memory, device.memory());
  const std::uint64_t needed = kStages * staging_bytes;
  if (static_cast<double>(needed) > static_cast<double>(memory.free_bytes) * free_fraction) {
    return fail(ErrorCode::kExhausted, "{} has {} free, too few for staging buffers of {}",
                device.id(), format_bytes(memory.free_bytes), format_bytes(needed));
  }
  std::unique_ptr<Helper> helper(new Helper(std::move(loan)));
  TRY(helper->staging_, device.allocate(needed));
  DeviceAddress at = helper->staging_->address();
  for (Stage& stage : helper->stages_) {
    stage.at = std::exchange(at, at + staging_bytes);
    TRY(stage.uploaded, device.make_local_event());
    TRY(stage.copied, device.make_local_event());
  }
  TRY(helper->upload_stream_, device.make_stream());
  TRY(helper->copy_stream_, device.make_stream());
  return helper;
}

Result<void> Helper::bring(std::span<const Upload> uploads, DeviceAddress to, std::uint64_t bytes) {
  TRY_VOID(failpoint("device.help"));
  Stage& stage = last_ == &stages_[0] ? stages_[1] : stages_[0];
  uploads_.assign(uploads.begin(), uploads.end());
  for (Upload& upload : uploads_) upload.to += stage.at;
  TRY_VOID(upload_stream_->wait(*stage.copied));
  TRY_VOID(upload_stream_->upload(uploads_));
  TRY_VOID(upload_stream_->record(*stage.uploaded));
  TRY_VOID(copy_stream_->wait(*stage.uploaded));
  const Move move{stage.at, to, bytes};
  TRY_VOID(copy_stream_->move({&move, 1}));
  TRY_VOID(copy_stream_->record(*stage.copied));
  last_ = &stage;
  return {};
}

Result<bool> Helper::is_idle() {
  TRY_VOID(failpoint("device.helped"));
  bool idle = true;
  for (const Stage& stage : stages_) {
    TRY(const bool done, loan_->device().is_done(*stage.copied));
    idle = idle && done;
  }
  return idle;
}

Result<void> Helper::finish(TimePoint deadline) {
  TRY_VOID(upload_stream_->finish(deadline));
  return copy_stream_->finish(deadline);
}

// A helper carries half of a bucket at most.
HelpedUpload::HelpedUpload(Device& target, const Plan& plan, SegmentFetch& fetch,
                           std::uint64_t bucket_bytes)
    : target_(target),
      plan_(plan),
      fetch_(fetch),
      staging_bytes_(round_up(bucket_bytes / 2, kPartAlignment)) {}

Result<void> HelpedUpload::add(std::unique_ptr<Loan> loan, double free_fraction) {
  TRY(auto helper, Helper::create(std::move(loan), target_, staging_bytes_, free_fraction));
  helpers_.push_back(std::move(helper));
  return {};
}

Result<void> HelpedUpload::blame(Helper& helper, Error why) {
  broken_ = true;
  helper.loan().condemn();
  // Every call to a broken context fails.
  if (auto memory = helper.loan().device().memory(); !memory) {
    lost_ = std::move(memory).error().with_context(helper.loan().device().id());
  }
  return fail(std::move(why).with_context(helper.loan().device().id() + " as a helper"));
}

// The links carry equal parts.
Result<void> HelpedUpload::upload(std::size_t bucket, DeviceAddress to, Stream& stream) {
  TRY_VOID(give_back());
  carriers_.clear();
  for (const auto& helper : helpers_) {
    if (!helper->loan().wanted_back()) carriers_.push_back(helper.get());
  }
  const auto all = fetch_.uploads(bucket, 0);
  const std::uint64_t share =
      plan_.bytes(bucket) / (carriers_.size() + 1) / kPartAlignment * kPartAlignment;
  if (share == 0) carriers_.clear();
  const std::uint64_t own = plan_.bytes(bucket) - carriers_.size() * share;
  std::uint64_t begin = own;
  for (Helper* const helper : carriers_) {
    part_.clear();
    cut_uploads(all, begin, begin + share, part_);
    if (auto queued = helper->bring(part_, to + begin, share); !queued) {
      return blame(*helper, std::move(queued).error());
    }
    begin += share;
    bytes_ += share;
  }
  part_.clear();
  cut_uploads(all, 0, own, part_);
  if (part_.empty()) return {};
  for (Upload& copy : part_) copy.to += to;
  return stream.upload(part_);
}

Result<void> HelpedUpload::SpreadStage::enqueue(std::size_t /*bucket*/, DeviceAddress /*at*/,
                                                Stream& stream) {
  for (Helper* const helper : all.carriers_) {
    if (auto waits = stream.wait(helper->brought()); !waits) {
      return all.blame(*helper, std::move(waits).error());
    }
  }
  return {};
}

Result<void> HelpedUpload::SpreadStage::check() {
  for (const auto& helper : all.helpers_) {
    if (auto idle = helper->is_idle(); !idle) {
      return all.blame(*helper, std::move(idle).error());
    }
  }
  return {};
}

bool HelpedUpload::wanted_back() const {
  return std::ranges::any_of(helpers_,
                             [](const auto& helper) { return helper->loan().wanted_back(); });
}

Result<void> HelpedUpload::give_back() {
  for (auto at = helpers_.begin(); at != helpers_.end();) {
    if (!(*at)->loan().wanted_back()) {
      ++at;
      continue;
    }
    auto idle = (*at)->is_idle();
    if (!idle) return blame(**at, std::move(idle).error());
    at = *idle ? helpers_.erase(at) : std::next(at);
  }
  return {};
}

// The work of a helper whose device has failed does not run any more.
Result<void> HelpedUpload::end(TimePoint deadline) {
  for (const auto& helper : helpers_) {
    const auto finished = helper->finish(deadline);
    if (!finished && finished.error().code() == ErrorCode::kTimeout) {
      return fail(Error(finished.error()).with_context(helper->loan().device().id()));
    }
  }
  carriers_.clear();
  helpers_.clear();
  return {};
}

}  // namespace rekindle::bucket
