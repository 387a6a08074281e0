#include "src/tensor/joint_declaration.h"

#include <algorithm>

#include "src/tensor/canonical.h"

namespace rekindle {

namespace {

constexpr std::string_view kDeclarationsMagic = "RKDECL01";

template <typename T, typename Less>
std::vector<const T*> in_order(const std::vector<T>& items, const Less& less) {
  std::vector<const T*> order;
  order.reserve(items.size());
  for (const T& item : items) order.push_back(&item);
  std::sort(order.begin(), order.end(), [&](const T* a, const T* b) { return less(*a, *b); });
  return order;
}

void write_tensor(const DeclaredTensor& tensor, canonical::Writer& out) {
  const TensorInfo& info = tensor.info;
  out.text(info.name);
  out.u8(static_cast<std::uint8_t>(info.dtype));
  out.u8(static_cast<std::uint8_t>(info.shape.rank()));
  out.dims(info.shape);
  out.u32(static_cast<std::uint32_t>(tensor.boxes.size()));
  for (const Box* box : in_order(tensor.boxes, std::less<Box>())) {
    const bool whole = is_whole(*box, info.shape);
    out.u8(whole ? 1 : 0);
    if (whole) continue;
    out.dims(box->offset);
    out.dims(box->extent);
  }
}

Failure bad_declarations(std::string_view why) {
  return fail(ErrorCode::kInvalid, "declarations: {}", why);
}

// Reads the declarations of one host, and counts their boxes.
class DeclarationReader {
 public:
  explicit DeclarationReader(std::string_view bytes) : in_(bytes) {}

  Result<JointHost> host() {
    constexpr std::size_t kMinRankBytes = 4 + 4;
    if (in_.raw(kDeclarationsMagic.size()) != kDeclarationsMagic) {
      return bad_declarations("not of a known format");
    }
    JointHost host;
    host.name = in_.text();
    const std::uint32_t count = in_.u32();
    if (!in_.ok() || count > in_.left() / kMinRankBytes) return bad_declarations("cut short");
    if (host.name.empty() || host.name.size() > kMaxHostNameBytes ||
        !canonical::is_utf8(host.name)) {
      return bad_declarations("the host has no name, or one that is too long or not UTF-8");
    }
    host.ranks.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      Declaration& rank = host.ranks.emplace_back();
      TRY_VOID(read_rank(rank));
      if (i > 0 && host.ranks[i - 1].rank >= rank.rank) {
        return bad_declarations("ranks are not in order");
      }
    }
    if (!in_.at_end()) return bad_declarations("has a tail");
    return host;
  }

 private:
  Result<void> read_rank(Declaration& rank) {
    constexpr std::size_t kMinTensorBytes = 4 + 1 + 1 + 1 + 4;
    rank.rank = in_.u32();
    const std::uint32_t count = in_.u32();
    if (!in_.ok() || count > in_.left() / kMinTensorBytes) return bad_declarations("cut short");
    TRY_VOID(count_boxes(count));
    rank.tensors.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      DeclaredTensor& tensor = rank.tensors.emplace_back();
      TRY_VOID(read_tensor(tensor));
      if (i > 0 && rank.tensors[i - 1].info.name >= tensor.info.name) {
        return bad_declarations("tensors are not in order");
      }
    }
    return {};
  }

  Result<void> read_tensor(DeclaredTensor& tensor) {
    TensorInfo& info = tensor.info;
    info.name = in_.text();
    const std::uint8_t dtype = in_.u8();
    in_.dims(in_.u8(), info.shape);
    const std::uint32_t count = in_.u32();
    if (!in_.ok() || count > in_.left()) {
      return bad_declarations("cut short, or a rank above 8");
    }
    TRY(info.dtype, dtype_from_wire(dtype));
    TRY_VOID(check_tensor(info));
    if (count > 1) TRY_VOID(count_boxes(count - 1));
    tensor.boxes.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      Box& box = tensor.boxes.emplace_back();
      TRY_VOID(read_box(info, box));
      if (i > 0 && tensor.boxes[i - 1] >= box) return bad_declarations("boxes are not in order");
    }
    return {};
  }

  Result<void> read_box(const TensorInfo& info, Box& box) {
    const std::uint8_t whole = in_.u8();
    if (in_.ok() && whole == 1) {
      box = Box::whole(info.shape);
      return {};
    }
    in_.dims(info.shape.rank(), box.offset);
    in_.dims(info.shape.rank(), box.extent);
    if (!in_.ok()) return bad_declarations("cut short");
    if (auto ok = check_box(box, info.shape); !ok) {
      return fail(std::move(ok).error().with_context(info.name));
    }
    if (whole != 0 || is_whole(box, info.shape)) return bad_declarations("not in canonical form");
    return {};
  }

  Result<void> count_boxes(std::size_t more) {
    boxes_ += more;
    if (boxes_ <= kMaxJointBoxes) return {};
    return fail(ErrorCode::kInvalid, "declarations: more than {} boxes, which is the limit",
                kMaxJointBoxes);
  }

  canonical::Reader in_;
  std::size_t boxes_ = 0;
};

}  // namespace

std::string serialize_declarations(const JointHost& host) {
  canonical::Writer out;
  out.raw(kDeclarationsMagic);
  out.text(host.name);
  out.u32(static_cast<std::uint32_t>(host.ranks.size()));
  const auto by_rank = [](const Declaration& a, const Declaration& b) { return a.rank < b.rank; };
  const auto by_name = [](const DeclaredTensor& a, const DeclaredTensor& b) {
    return a.info.name < b.info.name;
  };
  for (const Declaration* rank : in_order(host.ranks, by_rank)) {
    out.u32(rank->rank);
    out.u32(static_cast<std::uint32_t>(rank->tensors.size()));
    for (const DeclaredTensor* tensor : in_order(rank->tensors, by_name)) {
      write_tensor(*tensor, out);
    }
  }
  return out.take();
}

Result<JointHost> parse_declarations(std::string_view canonical) {
  return DeclarationReader(canonical).host();
}

}  // namespace rekindle
