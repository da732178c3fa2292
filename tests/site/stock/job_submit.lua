-- Our rules. A job must say which project pays for it.
function slurm_job_submit(job_desc, part_list, submit_uid)
  if job_desc.name ~= nil and job_desc.name:find("^noproject") then
    slurm.log_user("jobs need a project: ask the front desk")
    return slurm.ERROR
  end
  if job_desc.admin_comment == nil then job_desc.admin_comment = "seen by the rule of the house" end
  return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
-- end of our rules
