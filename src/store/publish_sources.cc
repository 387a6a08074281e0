#include "src/store/publish_sources.h"

#include <algorithm>
#include <cerrno>
#include <map>

#include <fcntl.h>

#include "src/base/beneath.h"
#include "src/base/units.h"
#include "src/store/files.h"
#include "src/store/segment_store.h"

namespace rekindle::store {

namespace {

using safetensors::Header;

// A file of a checkpoint.
struct Listed {
  fs::path path;
  // What links of the checkpoint may lead to.
  fs::path tree;
};

// Snapshots of the Hugging Face hub are links to blobs in the directory of their model.
fs::path tree_of(const fs::path& directory) {
  for (fs::path at = directory; at.has_relative_path(); at = at.parent_path()) {
    const fs::path model = at.parent_path().parent_path();
    if (at.parent_path().filename() == "snapshots" &&
        model.filename().string().starts_with("models--")) {
      return model;
    }
  }
  return directory;
}

// Of a directory, an index or a weights file that the caller has named.
Result<fs::path> tree_of_named(const fs::path& path) {
  std::error_code error;
  const bool is_index = path.extension() == ".json" && !fs::is_directory(path, error);
  const fs::path beside = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const fs::path real = fs::canonical(is_index ? beside : path, error);
  if (error) return fail_errno(error.value(), path.string());
  return tree_of(fs::is_directory(real, error) ? real : real.parent_path());
}

Result<SourceFile> source_of(UniqueFd fd, const fs::path& path) {
  SourceFile file;
  file.path = path;
  file.fd = std::move(fd);
  if (::fstat(file.fd.get(), &file.opened) != 0) {
    return fail_errno(errno, fmt::format("stat {}", path.string()));
  }
  if (!S_ISREG(file.opened.st_mode)) {
    return fail(ErrorCode::kInvalid, "{} is not a regular file", path.string());
  }
  return file;
}

// A checkpoint that somebody else made would publish any file of this host, if its links could lead
// anywhere.
Result<SourceFile> open_source(const Listed& listed) {
  std::error_code error;
  const fs::path real = fs::canonical(listed.path, error);
  if (error) return fail_errno(error.value(), listed.path.string());
  const fs::path below = real.lexically_relative(listed.tree);
  if (below.empty() || *below.begin() == "..") {
    return fail(
        ErrorCode::kDenied,
        "{} leads out of the checkpoint, to {}: copy the file into the checkpoint, or leave "
        "it out",
        listed.path.string(), real.string());
  }
  TRY(const UniqueFd tree, open_directory(listed.tree));
  auto fd = open_beneath(tree.get(), below.string(), O_RDONLY | O_NONBLOCK);
  if (!fd) return fail(std::move(fd).error().with_context(listed.path.string()));
  return source_of(std::move(*fd), listed.path);
}

Result<Header> read_source_header(SourceFile& file) {
  std::vector<std::byte> prefix(std::min<std::uint64_t>(8, file.size_bytes()));
  TRY_VOID(read_exactly(file.fd.get(), prefix, 0, file.path));
  const auto with_path = [&](Error error) {
    return fail(std::move(error).with_context(file.path.string()));
  };
  auto needed = safetensors::header_bytes(prefix, file.size_bytes());
  if (!needed) return with_path(std::move(needed).error());
  prefix.resize(*needed);
  TRY_VOID(read_exactly(file.fd.get(), std::span(prefix).subspan(8), 8, file.path));
  auto header = safetensors::parse_header(prefix, file.size_bytes());
  if (!header) return with_path(std::move(header).error());
  file.data_offset_bytes = header->data_offset_bytes;
  return header;
}

// A shard that was pulled: its entries are parts of tensors.
Result<void> check_no_parts(const Header& header, const fs::path& path) {
  for (const auto& entry : header.entries) {
    const auto at = header.metadata.find(entry.info.name);
    if (at != header.metadata.end() && at->second.starts_with(R"({"tensor":)")) {
      return fail(ErrorCode::kInvalid,
                  "{} is a shard ('{}' is a part of a tensor): publish a whole checkpoint",
                  path.string(), entry.info.name);
    }
  }
  return {};
}

std::string segment_name(const fs::path& path) {
  std::string name = path.filename().string();
  if (!name.ends_with(".safetensors")) name += ".safetensors";
  return name;
}

// Such a name would become a file on the disk of everyone who pulls the version.
Result<void> check_no_file_tensors(const Header& header, const fs::path& path) {
  for (const auto& entry : header.entries) {
    if (!is_file_tensor(entry.info.name)) continue;
    return fail(ErrorCode::kInvalid,
                "{} has a tensor named '{}': names that begin with {} are kept for the small files "
                "beside the weights; rename the tensor, or publish the file itself",
                path.string(), entry.info.name, kFileTensorPrefix);
  }
  return {};
}

// Where the tensors of one file lie, until the set of all tensors numbers them.
struct Placed {
  std::string name;
  std::uint32_t segment;
  std::uint64_t offset_bytes;
};

// Collects tensors, segments and places over all files.
struct Collector {
  std::vector<TensorInfo> tensors;
  std::vector<SegmentSpec> segments;
  std::vector<Placed> placed;

  void add(Header header, const fs::path& path) {
    const auto segment = static_cast<std::uint32_t>(segments.size());
    segments.push_back({segment_name(path), header.file_bytes});
    for (auto& entry : header.entries) {
      placed.push_back({entry.info.name, segment, entry.offset_bytes});
      tensors.push_back(std::move(entry.info));
    }
  }

  // The small files.
  Result<void> add_files(const std::map<std::string, Listed>& extras,
                         std::vector<SourceFile>& files, std::string& files_header) {
    std::vector<TensorInfo> infos;
    for (const auto& [name, listed] : extras) {
      std::string tensor = std::string(kFileTensorPrefix) + name;
      TRY(SourceFile file, open_source(listed));
      infos.push_back({std::move(tensor), DType::kU8, {file.size_bytes()}});
      files.push_back(std::move(file));
    }
    if (files.empty()) return {};
    TRY(files_header, safetensors::make_header(infos, {}, kPageBytes));
    const auto segment = static_cast<std::uint32_t>(segments.size());
    std::uint64_t offset = files_header.size();
    for (TensorInfo& info : infos) {
      placed.push_back({info.name, segment, offset});
      offset += info.size_bytes();
      tensors.push_back(std::move(info));
    }
    std::string name(kFilesSegmentName);
    const auto taken = [&] {
      return std::any_of(segments.begin(), segments.end(),
                         [&](const SegmentSpec& spec) { return spec.name == name; });
    };
    for (int i = 2; taken(); ++i) name = fmt::format("rekindle-files-{}.safetensors", i);
    segments.push_back({std::move(name), offset});
    return {};
  }
};

// By file name, and by relative name.
struct Found {
  std::map<std::string, Listed> weights;
  std::map<std::string, Listed> extras;
};

Result<Found> find_all(std::span<const fs::path> paths) {
  Found all;
  for (const fs::path& path : paths) {
    TRY(auto found, safetensors::find_checkpoint(path));
    TRY(const fs::path tree, tree_of_named(path));
    for (const fs::path& file : found.weights) {
      const auto [at, is_new] = all.weights.emplace(segment_name(file), Listed{file, tree});
      std::error_code ignored;
      if (!is_new && !fs::equivalent(at->second.path, file, ignored)) {
        return fail(ErrorCode::kInvalid, "{} and {} have the same file name: rename one",
                    at->second.path.string(), file.string());
      }
    }
    for (const auto& [name, file] : found.extras) all.extras.emplace(name, Listed{file, tree});
  }
  return all;
}

}  // namespace

Result<void> SourceFile::check_unchanged() const {
  struct stat now {};
  if (::fstat(fd.get(), &now) != 0) return fail_errno(errno, fmt::format("stat {}", path.string()));
  if (now.st_size == opened.st_size && now.st_mtim.tv_sec == opened.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == opened.st_mtim.tv_nsec) {
    return {};
  }
  return fail(ErrorCode::kCorrupt,
              "{} {} while it was published: publish it again when its writer is done",
              path.string(), now.st_size < opened.st_size ? "was truncated" : "changed");
}

Result<SourceFile> open_segment_as_source(const MappedSegment& segment) {
  const std::string name = fmt::format("/proc/self/fd/{}", segment.fd());
  UniqueFd fd(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return fail_errno(errno, fmt::format("open {}", segment.path().string()));
  return source_of(std::move(fd), segment.path());
}

Result<PublishSources> open_sources(std::span<const fs::path> paths) {
  TRY(const auto found, find_all(paths));
  std::vector<SourceFile> weights;
  std::vector<SourceFile> files;
  std::string files_header;
  Collector collector;
  for (const auto& [name, listed] : found.weights) {
    TRY(SourceFile file, open_source(listed));
    TRY(Header header, read_source_header(file));
    TRY_VOID(check_no_parts(header, listed.path));
    TRY_VOID(check_no_file_tensors(header, listed.path));
    collector.add(std::move(header), listed.path);
    weights.push_back(std::move(file));
  }
  if (weights.empty()) return fail(ErrorCode::kInvalid, "nothing to publish: name files");
  TRY_VOID(collector.add_files(found.extras, files, files_header));
  TRY(TensorSet tensors, TensorSet::create(std::move(collector.tensors)));
  std::vector<LayoutEntry> entries;
  entries.reserve(collector.placed.size());
  for (const Placed& placed : collector.placed) {
    const TensorIndex index = *tensors.find(placed.name);
    entries.push_back(
        {index, Box::whole(tensors[index].shape), placed.segment, placed.offset_bytes});
  }
  TRY(Layout layout, Layout::create(tensors, std::move(collector.segments), std::move(entries)));
  return PublishSources{std::move(weights), std::move(files), std::move(files_header),
                        std::move(tensors), std::move(layout)};
}

}  // namespace rekindle::store
