#include "src/client/publication.h"

#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::client {

namespace {

PublishBeginRequest request_of(const ModelVersion& id, std::span<const TensorInfo> tensors) {
  PublishBeginRequest request{id, {}};
  request.tensors.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) {
    const auto shape = tensor.shape.span();
    request.tensors.push_back(
        {tensor.name, std::string(dtype_name(tensor.dtype)), {shape.begin(), shape.end()}});
  }
  return request;
}

}  // namespace

Result<std::shared_ptr<Publication>> Publication::begin(std::shared_ptr<Connection> connection,
                                                        const ModelVersion& id,
                                                        std::vector<TensorInfo> tensors,
                                                        std::chrono::milliseconds timeout) {
  // Finds errors of the caller without asking the agent.
  TRY_VOID(TensorSet::create(tensors));
  const auto inbox = std::make_shared<Inbox>();
  TRY(Message answer, connection->call(request_of(id, tensors), 0, timeout, inbox));
  const auto* const begun = std::get_if<PublishBegunReply>(&answer.agent.reply);
  if (begun == nullptr) {
    return fail(ErrorCode::kInternal, "the agent answered a publish with something else");
  }
  std::shared_ptr<Publication> publication(
      new Publication(std::move(connection), inbox, answer.agent.session));
  TRY_VOID(publication->place(std::move(tensors), *begun));
  TRY(publication->segments_, map_segments(answer.descriptors, begun->segment_bytes, true));
  return publication;
}

Publication::~Publication() { abandon(); }

Result<void> Publication::place(std::vector<TensorInfo> tensors, const PublishBegunReply& begun) {
  std::vector<std::string> names;
  names.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  TRY(const TensorSet set, TensorSet::create(std::move(tensors)));
  auto layout = Layout::parse(set, begun.layout);
  if (!layout) {
    return fail(ErrorCode::kInternal, "the agent's layout does not fit: {}",
                layout.error().message());
  }
  const auto segments = layout->segments();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (i < begun.segment_bytes.size() && segments[i].size_bytes <= begun.segment_bytes[i])
      continue;
    return fail(ErrorCode::kInternal, "segment {} of the agent's layout did not come whole",
                segments[i].name);
  }
  for (const std::string& name : names) {
    const TensorIndex index = *set.find(name);
    const auto entries = layout->entries_of(index);
    const std::uint64_t bytes = set[index].size_bytes();
    if (entries.empty() && bytes == 0) {
      places_.push_back({});
    } else if (entries.size() == 1 && entries[0].box == Box::whole(set[index].shape)) {
      places_.push_back({entries[0].segment, entries[0].offset_bytes, bytes});
    } else {
      return fail(ErrorCode::kInternal, "the agent's layout does not hold '{}' as a whole", name);
    }
  }
  return {};
}

Result<std::span<std::byte>> Publication::data(std::size_t index) const {
  if (index >= places_.size()) {
    return fail(ErrorCode::kInvalid, "tensor {} of {}", index, places_.size());
  }
  const std::lock_guard lock(mutex_);
  if (ended_) return fail(ErrorCode::kStale, "the publication is over");
  const Place& place = places_[index];
  if (place.bytes == 0) return std::span<std::byte>();
  return std::span(segments_[place.segment].data() + place.offset_bytes, place.bytes);
}

bool Publication::end() {
  const std::lock_guard lock(mutex_);
  if (ended_) return false;
  ended_ = true;
  segments_.clear();
  return true;
}

Result<void> Publication::commit(std::chrono::milliseconds timeout) {
  if (!end()) return fail(ErrorCode::kStale, "the publication is over");
  auto answer = connection_->call(PublishCommitRequest{}, id_, timeout, inbox_);
  connection_->forget_session(id_, inbox_);
  if (!answer) return fail(std::move(answer).error());
  if (!std::holds_alternative<PublishedReply>(answer->agent.reply)) {
    return fail(ErrorCode::kInternal, "the agent answered a commit with something else");
  }
  return {};
}

void Publication::abandon() {
  if (!end()) return;
  connection_->forget_session(id_, inbox_);
  (void)connection_->send(PublishAbandonRequest{}, id_, kNoDeadline, nullptr);
}

}  // namespace rekindle::client
