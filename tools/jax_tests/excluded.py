"""JAX's tests that need not pass cast, because they look at what a cast changes on purpose: by reason, as globs."""

EXCLUDED = {
    "looks at how often a function is traced or compiled, or why": """
        *::test_cache_miss_explanations_* *::test_eval_shape_trace_cache_share *::test_user_trace_context_hooks
        *::test_different_devices_shmap_abstract_mesh_cache_hit
    """,
    "makes a new function of the same one, which `cast_fn` in a loop does too": "*::test_jit_global_cache",
    "looks at how soon a function is freed: it holds what was cast of it, and waits for Python's garbage collector": """
        *::test_jit_reference_dropping
    """,
    "looks at jaxprs, at what is kept for the backward pass, or at names in them": """
        *::test_slicing_with_vjp* *::test_remat_of_jit_input_to_output_forwarding *::test_saved_residuals_utility_jit
        *::test_name_stack_annotation *::test_res_forwarding_optimization* *::test_remat_of_scan_funky_custom_jvp
    """,
    "looks at tracebacks, or at the text of an error about where something was made": """
        *::TracebackTest::* *::test_escaped_tracer_omnistaging *::MutableArrayErrorsTest::test_return_from_jit*
    """,
    "looks at the function that `jax.jit` is given": """
        *::test_jit_of_generator *::test_jit_of_nonweakreferenceable_function *::test_staticmethod_is_not_supported
        *::test_jit_repr*
    """,
    "has indices checked in `jax.checkpoint`, which JAX refuses without a cast too": """
        checkify_test.py::*oob* checkify_test.py::*::test_jit_multi0 checkify_test.py::*::test_jit_ordering0
    """,
    "takes Taylor series of a jitted function, which cannot know of them, and `jet` has no rule for checkpoints": """
        jet_test.py::*::test_process_call jet_test.py::*::test_post_process_call
    """,
    "hands a mutable box, an experiment of `jax._src.hijax`, to a branch": "hijax_test.py::*::test_cond_box_arg",
    "is about the rounding of half values, which the policy raises to float32": "*::test_excess_precision_hell",
}
