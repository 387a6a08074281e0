#include "src/client/publication.h"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <utility>

#include <sys/stat.h>
#include <unistd.h>

#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::client {

namespace {

PublishBeginRequest request_of(const ModelVersion& id, std::span<const PublishedPart> parts,
                               bool joint) {
  PublishBeginRequest request;
  request.id = id;
  request.tensors.reserve(parts.size());
  const auto list = [](const Dims& dims) {
    return std::vector<std::uint64_t>(dims.span().begin(), dims.span().end());
  };
  for (const auto& [tensor, box] : parts) {
    PublishTensor one{
        tensor.name, std::string(dtype_name(tensor.dtype)), list(tensor.shape), {}, {}};
    if (joint) {
      one.offset = list(box.offset);
      one.extent = list(box.extent);
    }
    request.tensors.push_back(std::move(one));
  }
  return request;
}

Result<Layout> read_layout(const TensorSet& tensors, const PublishBegunReply& begun) {
  auto layout = Layout::parse(tensors, begun.layout);
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
  return layout;
}

// To map a small page takes longer than to copy it, and a write into the file maps none.
bool has_small_pages(int file) {
  struct stat status {};
  return ::fstat(file, &status) == 0 && status.st_blksize <= ::sysconf(_SC_PAGESIZE);
}

// False: not all bytes were written. Copy threads block all signals, so a limit of file sizes is
// only an error here.
bool write_at(int file, std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(written));
      offset += static_cast<std::uint64_t>(written);
    } else if (written == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

Result<std::shared_ptr<Publication>> Publication::begin(std::shared_ptr<Connection> connection,
                                                        const ModelVersion& id,
                                                        std::vector<TensorInfo> tensors,
                                                        std::chrono::milliseconds timeout) {
  // Finds errors of the caller without asking the agent.
  TRY_VOID(TensorSet::create(tensors));
  std::vector<PublishedPart> parts;
  parts.reserve(tensors.size());
  for (TensorInfo& tensor : tensors) {
    Box whole = Box::whole(tensor.shape);
    parts.push_back({std::move(tensor), whole});
  }
  TRY(auto publication, start(std::move(connection), request_of(id, parts, false), parts, timeout));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& pieces = publication->pieces_[i];
    if (pieces.size() == 1 ? pieces[0].box == parts[i].box : parts[i].box.empty()) continue;
    return fail(ErrorCode::kInternal, "the agent's layout does not hold '{}' as a whole",
                parts[i].tensor.name);
  }
  return publication;
}

Result<std::shared_ptr<Publication>> Publication::begin_joint(
    std::shared_ptr<Connection> connection, const ModelVersion& id, JointRank rank,
    std::vector<PublishedPart> parts, std::chrono::milliseconds timeout) {
  for (const auto& [tensor, box] : parts) {
    TRY_VOID(TensorSet::create({tensor}));
    if (auto fits = check_box(box, tensor.shape); !fits) {
      return fail(ErrorCode::kInvalid, "'{}' {}: {}", tensor.name, tensor.shape.to_string(),
                  fits.error().message());
    }
  }
  PublishBeginRequest request = request_of(id, parts, true);
  request.rank = rank.rank;
  request.world = rank.world;
  return start(std::move(connection), request, parts, timeout);
}

Result<std::shared_ptr<Publication>> Publication::start(std::shared_ptr<Connection> connection,
                                                        const PublishBeginRequest& request,
                                                        std::span<const PublishedPart> parts,
                                                        std::chrono::milliseconds timeout) {
  const auto inbox = std::make_shared<Inbox>();
  TRY(Message answer, connection->call(request, 0, timeout, inbox));
  const auto* const begun = std::get_if<PublishBegunReply>(&answer.agent.reply);
  if (begun == nullptr) {
    return fail(ErrorCode::kInternal, "the agent answered a publish with something else");
  }
  std::shared_ptr<Publication> publication(
      new Publication(std::move(connection), inbox, answer.agent.session));
  TRY(auto mappings, map_segments(answer.descriptors, begun->segment_bytes, true));
  for (std::size_t i = 0; i < mappings.size(); ++i) {
    publication->segments_.push_back(
        {std::move(mappings[i]), std::move(answer.descriptors[i]), false, 0, 0});
  }
  std::vector<TensorInfo> own;
  for (const PublishedPart& part : parts) own.push_back(part.tensor);
  TRY(const TensorSet tensors, begun->tensor_set.empty() ? TensorSet::create(std::move(own))
                                                         : TensorSet::parse(begun->tensor_set));
  TRY(const Layout layout, read_layout(tensors, *begun));
  TRY_VOID(publication->place(parts, tensors, layout));
  return publication;
}

Publication::~Publication() { abandon(); }

Result<void> Publication::place(std::span<const PublishedPart> parts, const TensorSet& tensors,
                                const Layout& layout) {
  pieces_.reserve(parts.size());
  for (const auto& [tensor, box] : parts) {
    const auto index = tensors.find(tensor.name);
    if (!index) {
      return fail(ErrorCode::kInternal, "the agent's tensors do not have '{}'", tensor.name);
    }
    std::vector<Piece>& pieces = pieces_.emplace_back();
    for (const LayoutEntry& entry : layout.entries_of(*index)) {
      if (entry.box.empty() || !contains(box, entry.box)) continue;
      const std::uint64_t bytes = entry.box.elements() * dtype_size_bytes(tensor.dtype);
      Segment& segment = segments_[entry.segment];
      pieces.push_back({entry.box, std::span(segment.memory.data() + entry.offset_bytes, bytes)});
      segment.unexpected_bytes += bytes;
      segment.missing_bytes += bytes;
    }
  }
  return {};
}

Result<std::span<const Publication::Piece>> Publication::pieces(std::size_t index) const {
  if (index >= pieces_.size()) {
    return fail(ErrorCode::kInvalid, "tensor {} of {}", index, pieces_.size());
  }
  const std::lock_guard lock(mutex_);
  if (ended_) return fail(ErrorCode::kStale, "the publication is over");
  return std::span(pieces_[index]);
}

Result<std::span<std::byte>> Publication::data(std::size_t index) const {
  TRY(const auto pieces, this->pieces(index));
  return pieces.empty() ? std::span<std::byte>() : pieces[0].bytes;
}

Result<std::shared_ptr<CopyThreads>> Publication::open_copies(std::size_t threads) {
  const std::lock_guard lock(mutex_);
  if (ended_) return fail(ErrorCode::kStale, "the publication is over");
  if (copies_) return fail(ErrorCode::kInvalid, "the publication has copy threads already");
  for (Segment& segment : segments_) {
    if (!has_small_pages(segment.file.get())) segment.file.reset();
  }
  copies_ = std::make_shared<CopyThreads>(threads, [this](const Copy& copy) { write(copy); });
  return copies_;
}

Publication::Segment* Publication::segment_of(const std::byte* target) {
  const auto holds = [&](const Segment& segment) {
    const std::byte* const begin = segment.memory.data();
    return begin != nullptr && !std::less<>()(target, begin) &&
           std::less<>()(target, begin + segment.memory.size());
  };
  const auto found = std::ranges::find_if(segments_, holds);
  return found == segments_.end() ? nullptr : &*found;
}

Result<void> Publication::expect(std::span<const Copy> copies) {
  const std::lock_guard lock(mutex_);
  if (ended_) return fail(ErrorCode::kStale, "the publication is over");
  // None is taken if one is refused.
  std::vector<std::uint64_t> left;
  for (const Segment& segment : segments_) left.push_back(segment.unexpected_bytes);
  for (const Copy& copy : copies) {
    if (copy.bytes == 0) continue;
    const Segment* const segment = segment_of(copy.target);
    if (segment == nullptr ||
        copy.bytes > segment->memory.size() -
                         static_cast<std::uint64_t>(copy.target - segment->memory.data())) {
      return fail(ErrorCode::kInvalid,
                  "{} bytes to copy do not lie in the publication's memory: give addresses that "
                  "rk_publish_data or rk_publish_pieces has returned, and each byte once",
                  copy.bytes);
    }
    std::uint64_t& its = left[static_cast<std::size_t>(segment - segments_.data())];
    if (copy.bytes > its) {
      return fail(ErrorCode::kInvalid, "some bytes are copied twice: give each byte once");
    }
    its -= copy.bytes;
  }
  for (std::size_t i = 0; i < left.size(); ++i) segments_[i].unexpected_bytes = left[i];
  return {};
}

void Publication::write(const Copy& copy) {
  if (!write_to_file(copy)) copy_to_memory(copy);
  arrived(copy);
}

// False: copy all bytes to the mapping. The segment stays as it is until its last byte has arrived,
// or until no thread copies.
bool Publication::write_to_file(const Copy& copy) {
  if (copy.source == nullptr) return false;
  Segment* segment = nullptr;
  {
    const std::lock_guard lock(mutex_);
    segment = segment_of(copy.target);
    if (!segment->file || segment->writing) return false;
    segment->writing = true;
  }
  const auto offset = static_cast<std::uint64_t>(copy.target - segment->memory.data());
  const bool written = write_at(segment->file.get(), offset, {copy.source, copy.bytes});
  const std::lock_guard lock(mutex_);
  segment->writing = false;
  return written;
}

// Nothing else writes to a segment whose bytes have all arrived.
void Publication::arrived(const Copy& copy) {
  PublishWrittenRequest written;
  Mapping whole;
  UniqueFd file;
  {
    const std::lock_guard lock(mutex_);
    Segment* const segment = segment_of(copy.target);
    segment->missing_bytes -= copy.bytes;
    if (segment->missing_bytes > 0) return;
    whole = std::move(segment->memory);
    file = std::move(segment->file);
    written.segment = static_cast<std::uint32_t>(segment - segments_.data());
  }
  whole = Mapping();
  file.reset();
  // If it is not sent, the agent digests the segment at the commit.
  (void)connection_->send(written, id_, kNoDeadline, nullptr);
}

bool Publication::end() {
  std::shared_ptr<CopyThreads> copies;
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = !std::exchange(ended_, true);
    copies = copies_;
  }
  if (copies) copies->close();
  if (!first) return false;
  const std::lock_guard lock(mutex_);
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
