#include <memory>
#include <utility>

#include "src/client/c_boundary.h"

// rk_publish_*.
namespace rekindle::client {

namespace {

// The store may have to make room.
constexpr std::chrono::milliseconds kBeginTimeout{30'000};

Result<TensorInfo> tensor_info_of(const rk_tensor_spec& spec) {
  if (spec.name == nullptr || spec.dtype == nullptr) {
    return fail(ErrorCode::kInvalid, "a tensor without a name or dtype");
  }
  if (spec.dimensions > 0 && spec.shape == nullptr) {
    return fail(ErrorCode::kInvalid, "tensor '{}' without a shape", spec.name);
  }
  TensorInfo tensor;
  tensor.name = spec.name;
  TRY(tensor.dtype, parse_dtype(spec.dtype));
  TRY(tensor.shape, Dims::from(std::span(spec.shape, spec.dimensions)));
  return tensor;
}

}  // namespace

extern "C" {

RK_API int32_t rk_publish_begin(rk_agent* agent, const char* model_version,
                                const rk_tensor_spec* tensors, size_t count,
                                rk_publication** publication, rk_error* error) {
  if (publication != nullptr) *publication = nullptr;
  return guarded(error, [&]() -> Result<void> {
    TRY(auto connection, object_of(agent, "agent"));
    if (publication == nullptr || model_version == nullptr || tensors == nullptr || count == 0) {
      return fail(ErrorCode::kInvalid,
                  "publish without a version, without tensors or without a "
                  "place for the publication");
    }
    TRY(const ModelRef model, ModelRef::parse(model_version));
    if (!model.version) {
      return fail(ErrorCode::kInvalid, "publish '{}': which version? Say {}@NUMBER", model_version,
                  model_version);
    }
    std::vector<TensorInfo> infos;
    infos.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      TRY(TensorInfo info, tensor_info_of(tensors[i]));
      infos.push_back(std::move(info));
    }
    auto handle = std::make_unique<rk_publication>();
    auto begun = Publication::begin(std::move(connection), {model.model, *model.version},
                                    std::move(infos), kBeginTimeout);
    if (!begun) {
      return fail(std::move(begun).error().with_context(fmt::format("publish {}", model_version)));
    }
    handle->object = std::move(*begun);
    *publication = handle.release();
    return {};
  });
}

RK_API int32_t rk_publish_data(rk_publication* publication, size_t index, void** data,
                               uint64_t* bytes, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(publication, "publication"));
    TRY(const auto place, object->data(index));
    if (data != nullptr) *data = place.data();
    if (bytes != nullptr) *bytes = place.size();
    return {};
  });
}

RK_API int32_t rk_publish_commit(rk_publication* publication, int64_t timeout_ms, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(publication, "publication"));
    // The publication ends, also on an error.
    const std::unique_ptr<rk_publication> handle(publication);
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object->commit(timeout);
  });
}

RK_API void rk_publish_abandon(rk_publication* publication) {
  if (publication == nullptr) return;
  guarded(nullptr, [&]() -> Result<void> {
    if (!publication->is_owner()) return {};
    publication->object->abandon();
    delete publication;
    return {};
  });
}

}  // extern "C"

}  // namespace rekindle::client
