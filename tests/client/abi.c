/* The ABI of librekindle.so.1 on 64-bit systems, made by tests/client/make_abi. It does not
 * compile or link if a structure, a value or a function has changed or is gone. */
/* clang-format off */
#include <rekindle.h>

#define HOLDS(fact) _Static_assert(fact, "the ABI has changed: " #fact)
#define IS(structure, field, type) \
  HOLDS(__builtin_types_compatible_p(__typeof__(((structure*)0)->field), type))

HOLDS(sizeof(rk_error) == 1024);
HOLDS(offsetof(rk_error, code) == 0);
IS(rk_error, code, int32_t);
HOLDS(offsetof(rk_error, message) == 4);
IS(rk_error, message, char [1020]);
HOLDS(sizeof(rk_connect_options) >= 24);
HOLDS(offsetof(rk_connect_options, size) == 0);
IS(rk_connect_options, size, uint32_t);
HOLDS(offsetof(rk_connect_options, store) == 8);
IS(rk_connect_options, store, const char *);
HOLDS(offsetof(rk_connect_options, timeout_ms) == 16);
IS(rk_connect_options, timeout_ms, int64_t);
HOLDS(sizeof(rk_box) == 32);
HOLDS(offsetof(rk_box, tensor) == 0);
IS(rk_box, tensor, const char *);
HOLDS(offsetof(rk_box, dimensions) == 8);
IS(rk_box, dimensions, uint32_t);
HOLDS(offsetof(rk_box, offset) == 16);
IS(rk_box, offset, const uint64_t *);
HOLDS(offsetof(rk_box, extent) == 24);
IS(rk_box, extent, const uint64_t *);
HOLDS(sizeof(rk_attach_options) >= 128);
HOLDS(offsetof(rk_attach_options, size) == 0);
IS(rk_attach_options, size, uint32_t);
HOLDS(offsetof(rk_attach_options, model) == 8);
IS(rk_attach_options, model, const char *);
HOLDS(offsetof(rk_attach_options, shard) == 16);
IS(rk_attach_options, shard, const char *);
HOLDS(offsetof(rk_attach_options, spec_json) == 24);
IS(rk_attach_options, spec_json, const char *);
HOLDS(offsetof(rk_attach_options, boxes) == 32);
IS(rk_attach_options, boxes, const rk_box *);
HOLDS(offsetof(rk_attach_options, box_count) == 40);
IS(rk_attach_options, box_count, size_t);
HOLDS(offsetof(rk_attach_options, instance) == 48);
IS(rk_attach_options, instance, const char *);
HOLDS(offsetof(rk_attach_options, generation) == 56);
IS(rk_attach_options, generation, uint64_t);
HOLDS(offsetof(rk_attach_options, rank) == 64);
IS(rk_attach_options, rank, uint32_t);
HOLDS(offsetof(rk_attach_options, world) == 68);
IS(rk_attach_options, world, uint32_t);
HOLDS(offsetof(rk_attach_options, fallback_dir) == 72);
IS(rk_attach_options, fallback_dir, const char *);
HOLDS(offsetof(rk_attach_options, timeout_ms) == 80);
IS(rk_attach_options, timeout_ms, int64_t);
HOLDS(offsetof(rk_attach_options, device) == 88);
IS(rk_attach_options, device, const char *);
HOLDS(offsetof(rk_attach_options, stream) == 96);
IS(rk_attach_options, stream, void *);
HOLDS(offsetof(rk_attach_options, bucket_bytes) == 104);
IS(rk_attach_options, bucket_bytes, uint64_t);
HOLDS(offsetof(rk_attach_options, group) == 112);
IS(rk_attach_options, group, const char *);
HOLDS(offsetof(rk_attach_options, staged) == 120);
IS(rk_attach_options, staged, uint32_t);
HOLDS(sizeof(rk_session_info) >= 64);
HOLDS(offsetof(rk_session_info, size) == 0);
IS(rk_session_info, size, uint32_t);
HOLDS(offsetof(rk_session_info, model) == 8);
IS(rk_session_info, model, const char *);
HOLDS(offsetof(rk_session_info, version) == 16);
IS(rk_session_info, version, uint64_t);
HOLDS(offsetof(rk_session_info, bytes_done) == 24);
IS(rk_session_info, bytes_done, uint64_t);
HOLDS(offsetof(rk_session_info, bytes_total) == 32);
IS(rk_session_info, bytes_total, uint64_t);
HOLDS(offsetof(rk_session_info, tensors) == 40);
IS(rk_session_info, tensors, uint32_t);
HOLDS(offsetof(rk_session_info, rung) == 48);
IS(rk_session_info, rung, const char *);
HOLDS(offsetof(rk_session_info, device_path) == 56);
IS(rk_session_info, device_path, const char *);
HOLDS(sizeof(rk_tensor) == 64);
HOLDS(offsetof(rk_tensor, name) == 0);
IS(rk_tensor, name, const char *);
HOLDS(offsetof(rk_tensor, dtype) == 8);
IS(rk_tensor, dtype, const char *);
HOLDS(offsetof(rk_tensor, dimensions) == 16);
IS(rk_tensor, dimensions, uint32_t);
HOLDS(offsetof(rk_tensor, shape) == 24);
IS(rk_tensor, shape, const uint64_t *);
HOLDS(offsetof(rk_tensor, offset) == 32);
IS(rk_tensor, offset, const uint64_t *);
HOLDS(offsetof(rk_tensor, full_shape) == 40);
IS(rk_tensor, full_shape, const uint64_t *);
HOLDS(offsetof(rk_tensor, data) == 48);
IS(rk_tensor, data, const void *);
HOLDS(offsetof(rk_tensor, bytes) == 56);
IS(rk_tensor, bytes, uint64_t);
HOLDS(sizeof(rk_part) == 48);
HOLDS(offsetof(rk_part, tensor) == 0);
IS(rk_part, tensor, const rk_tensor *);
HOLDS(offsetof(rk_part, offset_bytes) == 8);
IS(rk_part, offset_bytes, uint64_t);
HOLDS(offsetof(rk_part, bytes) == 16);
IS(rk_part, bytes, uint64_t);
HOLDS(offsetof(rk_part, data) == 24);
IS(rk_part, data, void *);
HOLDS(offsetof(rk_part, reserved) == 32);
IS(rk_part, reserved, uint64_t [2]);
HOLDS(sizeof(rk_target) == 48);
HOLDS(offsetof(rk_target, tensor) == 0);
IS(rk_target, tensor, const char *);
HOLDS(offsetof(rk_target, offset) == 8);
IS(rk_target, offset, const uint64_t *);
HOLDS(offsetof(rk_target, data) == 16);
IS(rk_target, data, void *);
HOLDS(offsetof(rk_target, bytes) == 24);
IS(rk_target, bytes, uint64_t);
HOLDS(offsetof(rk_target, reserved) == 32);
IS(rk_target, reserved, uint64_t [2]);
HOLDS(sizeof(rk_phase) == 16);
HOLDS(offsetof(rk_phase, name) == 0);
IS(rk_phase, name, const char *);
HOLDS(offsetof(rk_phase, elapsed_us) == 8);
IS(rk_phase, elapsed_us, uint64_t);
HOLDS(sizeof(rk_tensor_spec) == 32);
HOLDS(offsetof(rk_tensor_spec, name) == 0);
IS(rk_tensor_spec, name, const char *);
HOLDS(offsetof(rk_tensor_spec, dtype) == 8);
IS(rk_tensor_spec, dtype, const char *);
HOLDS(offsetof(rk_tensor_spec, dimensions) == 16);
IS(rk_tensor_spec, dimensions, uint32_t);
HOLDS(offsetof(rk_tensor_spec, shape) == 24);
IS(rk_tensor_spec, shape, const uint64_t *);
HOLDS(sizeof(rk_joint_options) >= 32);
HOLDS(offsetof(rk_joint_options, size) == 0);
IS(rk_joint_options, size, uint32_t);
HOLDS(offsetof(rk_joint_options, model_version) == 8);
IS(rk_joint_options, model_version, const char *);
HOLDS(offsetof(rk_joint_options, rank) == 16);
IS(rk_joint_options, rank, uint32_t);
HOLDS(offsetof(rk_joint_options, world) == 20);
IS(rk_joint_options, world, uint32_t);
HOLDS(offsetof(rk_joint_options, timeout_ms) == 24);
IS(rk_joint_options, timeout_ms, int64_t);
HOLDS(sizeof(rk_joint_part) == 48);
HOLDS(offsetof(rk_joint_part, tensor) == 0);
IS(rk_joint_part, tensor, rk_tensor_spec);
HOLDS(offsetof(rk_joint_part, offset) == 32);
IS(rk_joint_part, offset, const uint64_t *);
HOLDS(offsetof(rk_joint_part, extent) == 40);
IS(rk_joint_part, extent, const uint64_t *);
HOLDS(sizeof(rk_piece) == 32);
HOLDS(offsetof(rk_piece, offset) == 0);
IS(rk_piece, offset, const uint64_t *);
HOLDS(offsetof(rk_piece, extent) == 8);
IS(rk_piece, extent, const uint64_t *);
HOLDS(offsetof(rk_piece, data) == 16);
IS(rk_piece, data, void *);
HOLDS(offsetof(rk_piece, bytes) == 24);
IS(rk_piece, bytes, uint64_t);
HOLDS(sizeof(rk_copy) == 24);
HOLDS(offsetof(rk_copy, target) == 0);
IS(rk_copy, target, void *);
HOLDS(offsetof(rk_copy, source) == 8);
IS(rk_copy, source, const void *);
HOLDS(offsetof(rk_copy, bytes) == 16);
IS(rk_copy, bytes, uint64_t);
HOLDS(sizeof(rk_update_options) >= 48);
HOLDS(offsetof(rk_update_options, size) == 0);
IS(rk_update_options, size, uint32_t);
HOLDS(offsetof(rk_update_options, model_version) == 8);
IS(rk_update_options, model_version, const char *);
HOLDS(offsetof(rk_update_options, group) == 16);
IS(rk_update_options, group, const char *);
HOLDS(offsetof(rk_update_options, gather_ms) == 24);
IS(rk_update_options, gather_ms, int64_t);
HOLDS(offsetof(rk_update_options, timeout_ms) == 32);
IS(rk_update_options, timeout_ms, int64_t);
HOLDS(offsetof(rk_update_options, members) == 40);
IS(rk_update_options, members, uint32_t);
HOLDS(sizeof(rk_phase_summary) == 272);
HOLDS(offsetof(rk_phase_summary, name) == 0);
IS(rk_phase_summary, name, char [16]);
HOLDS(offsetof(rk_phase_summary, median_us) == 16);
IS(rk_phase_summary, median_us, uint64_t);
HOLDS(offsetof(rk_phase_summary, p95_us) == 24);
IS(rk_phase_summary, p95_us, uint64_t);
HOLDS(offsetof(rk_phase_summary, slowest_us) == 32);
IS(rk_phase_summary, slowest_us, uint64_t);
HOLDS(offsetof(rk_phase_summary, slowest) == 40);
IS(rk_phase_summary, slowest, char [232]);
HOLDS(sizeof(rk_update_result) >= 1664);
HOLDS(offsetof(rk_update_result, size) == 0);
IS(rk_update_result, size, uint32_t);
HOLDS(offsetof(rk_update_result, members) == 4);
IS(rk_update_result, members, uint32_t);
HOLDS(offsetof(rk_update_result, ready) == 8);
IS(rk_update_result, ready, uint32_t);
HOLDS(offsetof(rk_update_result, by_broadcast) == 12);
IS(rk_update_result, by_broadcast, uint32_t);
HOLDS(offsetof(rk_update_result, elapsed_ms) == 16);
IS(rk_update_result, elapsed_ms, uint64_t);
HOLDS(offsetof(rk_update_result, phase_count) == 24);
IS(rk_update_result, phase_count, uint32_t);
HOLDS(offsetof(rk_update_result, phases) == 32);
IS(rk_update_result, phases, rk_phase_summary [6]);
HOLDS(sizeof(rk_tensor_layout) == 40);
HOLDS(offsetof(rk_tensor_layout, data) == 0);
IS(rk_tensor_layout, data, uint64_t);
HOLDS(offsetof(rk_tensor_layout, device_type) == 8);
IS(rk_tensor_layout, device_type, int32_t);
HOLDS(offsetof(rk_tensor_layout, device_id) == 12);
IS(rk_tensor_layout, device_id, int32_t);
HOLDS(offsetof(rk_tensor_layout, dtype_code) == 16);
IS(rk_tensor_layout, dtype_code, uint8_t);
HOLDS(offsetof(rk_tensor_layout, dtype_bits) == 17);
IS(rk_tensor_layout, dtype_bits, uint8_t);
HOLDS(offsetof(rk_tensor_layout, dtype_lanes) == 18);
IS(rk_tensor_layout, dtype_lanes, uint16_t);
HOLDS(offsetof(rk_tensor_layout, dimensions) == 20);
IS(rk_tensor_layout, dimensions, uint32_t);
HOLDS(offsetof(rk_tensor_layout, first_dimension) == 24);
IS(rk_tensor_layout, first_dimension, uint64_t);
HOLDS(offsetof(rk_tensor_layout, contiguous) == 32);
IS(rk_tensor_layout, contiguous, uint32_t);
HOLDS(offsetof(rk_tensor_layout, reserved) == 36);
IS(rk_tensor_layout, reserved, uint32_t);
HOLDS(RK_OK == 0);
HOLDS(RK_INVALID == 1);
HOLDS(RK_NOT_FOUND == 2);
HOLDS(RK_TIMEOUT == 3);
HOLDS(RK_PEER_LOST == 4);
HOLDS(RK_STALE == 5);
HOLDS(RK_CORRUPT == 6);
HOLDS(RK_EXHAUSTED == 7);
HOLDS(RK_DENIED == 8);
HOLDS(RK_UNAVAILABLE == 9);
HOLDS(RK_INTERNAL == 10);

/* Declared again: another type is an error. */
uint32_t rk_api_version(void);
const char* rk_library_version(void);
const char* rk_code_name(int32_t code);
int32_t rk_connect(const rk_connect_options* options, rk_agent** agent, rk_error* error);
void rk_interrupt(rk_agent* agent);
void rk_disconnect(rk_agent* agent);
int32_t rk_attach(rk_agent* agent, const rk_attach_options* options, rk_session** session, rk_error* error);
int32_t rk_info(rk_session* session, rk_session_info* info, rk_error* error);
int32_t rk_catalog(rk_session* session, const rk_tensor** tensors, size_t* count, rk_error* error);
int32_t rk_next(rk_session* session, int64_t timeout_ms, const rk_tensor** tensors, size_t* count, rk_error* error);
int32_t rk_tensor_count(rk_session* session, size_t* count, rk_error* error);
int32_t rk_tensors(rk_session* session, const rk_tensor** tensors, size_t* count, rk_error* error);
int32_t rk_next_bucket(rk_session* session, int64_t timeout_ms, const rk_part** parts, size_t* count, rk_error* error);
int32_t rk_load_into(rk_session* session, const rk_target* targets, size_t count, int64_t timeout_ms, rk_error* error);
int32_t rk_prefetch(rk_session* session, uint64_t bytes, int64_t timeout_ms, rk_error* error);
int32_t rk_stage(rk_session* session, uint64_t reserve_bytes, int64_t timeout_ms, rk_error* error);
int32_t rk_begin_switch(rk_session* session, int64_t timeout_ms, rk_error* error);
int32_t rk_report_phases(rk_session* session, const rk_phase* phases, size_t count, rk_error* error);
int32_t rk_loaded(rk_session* session, rk_error* error);
int32_t rk_wait_commit(rk_session* session, int64_t timeout_ms, rk_error* error);
int32_t rk_wait_update(rk_session* session, int64_t timeout_ms, uint64_t* version, rk_error* error);
void rk_detach(rk_session* session);
int32_t rk_publish_begin(rk_agent* agent, const char* model_version, const rk_tensor_spec* tensors, size_t count, rk_publication** publication, rk_error* error);
int32_t rk_publish_data(rk_publication* publication, size_t index, void** data, uint64_t* bytes, rk_error* error);
int32_t rk_publish_commit(rk_publication* publication, int64_t timeout_ms, rk_error* error);
void rk_publish_abandon(rk_publication* publication);
int32_t rk_publish_begin_joint(rk_agent* agent, const rk_joint_options* options, const rk_joint_part* parts, size_t count, rk_publication** publication, rk_error* error);
int32_t rk_publish_pieces(rk_publication* publication, size_t index, rk_piece* pieces, size_t capacity, size_t* count, rk_error* error);
int32_t rk_copies_open(rk_publication* publication, uint32_t threads, rk_copies** copies, rk_error* error);
int32_t rk_copies_put(rk_copies* copies, const rk_copy* list, size_t count, uint64_t* number, rk_error* error);
int32_t rk_copies_wait(rk_copies* copies, uint64_t number, int64_t timeout_ms, rk_error* error);
void rk_copies_close(rk_copies* copies);
int32_t rk_update(rk_agent* agent, const rk_update_options* options, rk_update_result* result, rk_error* error);
int32_t rk_describe_tensors(rk_dlpack_exporter exporter, void* const* objects, size_t count, rk_tensor_layout* layouts, int64_t* shapes, int64_t* strides, size_t capacity, size_t* described, rk_error* error);

typedef void (*function)(void);
function functions[] = {
    (function)rk_api_version,
    (function)rk_library_version,
    (function)rk_code_name,
    (function)rk_connect,
    (function)rk_interrupt,
    (function)rk_disconnect,
    (function)rk_attach,
    (function)rk_info,
    (function)rk_catalog,
    (function)rk_next,
    (function)rk_tensor_count,
    (function)rk_tensors,
    (function)rk_next_bucket,
    (function)rk_load_into,
    (function)rk_prefetch,
    (function)rk_stage,
    (function)rk_begin_switch,
    (function)rk_report_phases,
    (function)rk_loaded,
    (function)rk_wait_commit,
    (function)rk_wait_update,
    (function)rk_detach,
    (function)rk_publish_begin,
    (function)rk_publish_data,
    (function)rk_publish_commit,
    (function)rk_publish_abandon,
    (function)rk_publish_begin_joint,
    (function)rk_publish_pieces,
    (function)rk_copies_open,
    (function)rk_copies_put,
    (function)rk_copies_wait,
    (function)rk_copies_close,
    (function)rk_update,
    (function)rk_describe_tensors,
};

int main(void) { return functions[0] == NULL; }
