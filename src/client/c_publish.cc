#include <utility>

#include "src/client/c_boundary.h"
#include "src/client/c_handles.h"

// rk_publish_*.
using namespace rekindle;          // NOLINT(google-build-using-namespace)
using namespace rekindle::client;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::chrono::milliseconds kBeginTimeout{30'000};  // the store may have to make room

Result<TensorInfo> tensor_of(const rk_tensor_spec& spec) {
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

int32_t rk_publish_begin(rk_agent* agent, const char* model_version, const rk_tensor_spec* tensors,
                         size_t count, rk_publication** publication, rk_error* error) {
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
      TRY(TensorInfo info, tensor_of(tensors[i]));
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

int32_t rk_publish_data(rk_publication* publication, size_t index, void** data, uint64_t* bytes,
                        rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(publication, "publication"));
    TRY(const auto place, object->data(index));
    if (data != nullptr) *data = place.data();
    if (bytes != nullptr) *bytes = place.size();
    return {};
  });
}

int32_t rk_publish_commit(rk_publication* publication, int64_t timeout_ms, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(publication, "publication"));
    const std::unique_ptr<rk_publication> handle(publication);  // over, whatever the outcome
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object->commit(timeout);
  });
}

void rk_publish_abandon(rk_publication* publication) {
  if (publication == nullptr) return;
  guarded(nullptr, [&]() -> Result<void> {
    if (!publication->is_owner()) return {};
    publication->object->abandon();
    delete publication;
    return {};
  });
}

}  // extern "C"
